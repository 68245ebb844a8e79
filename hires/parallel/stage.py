"""Runs the nodes of one stage on one rank, in order, on its tile.

With checkpointing a stage is cut into segments. A segment keeps its inputs only; when its gradient
comes it runs once more, and autograd goes back through that run:

    forward     in0 -> [segment 0] -> in1 -> [segment 1] -> out      keeps in0, in1
    backward                          in1 -> [segment 1] ~> grad of in1
                in0 -> [segment 0] ~> grad of in0                    ~> back through the new run

Source:
    Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hires.nets.constants import constant_tensor
from hires.parallel.buffer_states import BufferStates
from hires.parallel.compile_node import compile_node
from hires.parallel.context import Context
from hires.parallel.image_kernels import Operator, Values
from hires.plan.graph import Node, describe
from hires.plan.operators.operator_facts import facts_of
from hires.plan.rules import TILED


class StageModule:
    """The nodes of one stage on one rank; ``tensors`` are its parameters and buffers by name."""

    def __init__(self, context: Context, tensors: dict[str, Tensor]) -> None:
        plan, stage = context.plan, context.stage
        self.nodes = plan.nodes(stage.index)
        facts = {name: plan.graph.params[name] for node in self.nodes for name in node.params}
        self.tensors = {
            name: constant_tensor(fact).to(context.device) if fact.is_constant else tensors[name]
            for name, fact in facts.items()
        }
        self.parameters = {n: t for n, t in self.tensors.items() if isinstance(t, nn.Parameter)}
        sent = [edge.value for edge in plan.edges if edge.source == stage.index]
        last = [plan.graph.output] if stage.index == len(plan.stages) - 1 else []
        self.outputs = list(dict.fromkeys(sent + last))
        bounds = stage.segments or [stage.first, stage.last]
        parts = [plan.graph.nodes[a:b] for a, b in itertools.pairwise(bounds)]
        reads = [{name for node in nodes for name in node.inputs} for nodes in parts]
        self.buffers = BufferStates(context, self.nodes, self.tensors)
        self.segments = [
            Segment(
                context, nodes, self.buffers, self.tensors, set(self.outputs).union(*reads[i + 1 :])
            )
            for i, nodes in enumerate(parts)
        ]
        self.recomputes = bool(stage.segments)
        # Parameters of tiled values have a part of their gradient on each tile. Behind the global
        # pool every tile has all of it. A shard has its samples' part of every gradient.
        partial = [n for n in self.nodes if stage.shards > 1 or stage.layout[n.name] == TILED]
        self.partial = self.parameters.keys() & {name for n in partial for name in n.params}

    def forward(self, inputs: Values) -> dict[str, Tensor]:
        """Returns the values that leave the stage, from those that enter it."""
        # A value is released after its last reader, so that only what autograd needs stays.
        values = dict(inputs)
        for index, segment in enumerate(self.segments):
            read = {name: values[name] for name in segment.inputs}
            if self.recomputes and torch.is_grad_enabled():
                # Parameters are no inputs of the Function: the anchor makes autograd come back
                # even if no input asks for a gradient.
                anchor, given = torch.empty(0, requires_grad=True), read.values()
                made = _Recomputed.apply(anchor, segment, *given)  # type: ignore[no-untyped-call]
                values |= dict(zip(segment.outputs, made, strict=True))
            else:
                values |= segment.run(read)
            needed = {n for later in self.segments[index + 1 :] for n in later.inputs}
            values = {n: v for n, v in values.items() if n in needed or n in self.outputs}
        return {name: values[name] for name in self.outputs}


class Segment:
    """Consecutive nodes of a stage; ``later`` are the values that are read behind them."""

    def __init__(
        self,
        context: Context,
        nodes: list[Node],
        buffers: BufferStates,
        tensors: dict[str, Tensor],
        later: set[str],
    ) -> None:
        self.context = context
        made = {node.name for node in nodes}
        self.outputs = [node.name for node in nodes if node.name in later]
        reads = dict.fromkeys(name for node in nodes for name in node.inputs)
        self.inputs = [name for name in reads if name not in made]
        in_place = _in_place(nodes, self.outputs, context.stage.extents)
        last_use = {name: index for index, node in enumerate(nodes) for name in node.inputs}
        self._steps: list[tuple[Node, Operator, list[str]]] = []
        for index, node in enumerate(nodes):
            overwrites = node.name in in_place
            run = _overwriting(node) if overwrites else buffers.reader(node)
            run = run or compile_node(node, context, tensors)
            dead = [n for n in node.inputs if last_use[n] == index and n not in self.outputs]
            self._steps.append((node, run, dead))

    def run(self, values: Values) -> dict[str, Tensor]:
        """Returns the outputs from the inputs; ``values`` is used up."""
        for node, run, dead in self._steps:
            try:
                values[node.name] = run(values)
            except Exception as error:
                notes = [*getattr(error, "__notes__", []), f"in {describe(node)}"]
                error.__notes__ = notes  # type: ignore[attr-defined]
                raise
            for one in dead:
                del values[one]
        return {name: values[name] for name in self.outputs}


class _Recomputed(torch.autograd.Function):
    # Inputs of a segment -> its outputs, the segment computed again on the way back.
    # ``torch.utils.checkpoint`` would keep the halos of the first run, which hang on autograd's
    # nodes and not on saved tensors. Here the second run is one piece, and its halos and statistics
    # are exchanged in the same order on all tiles: events of the plan like those of the first run.
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, segment: Segment, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.segment = segment
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.microbatch, kind = segment.context.microbatch, segment.context.device.type
        ctx.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        outputs = segment.run(dict(zip(segment.inputs, tensors, strict=True)))
        return tuple(outputs[name] for name in segment.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        needs = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        leaves = [tensor.detach().requires_grad_(needed) for tensor, needed in needs]
        enabled, dtype = ctx.autocast
        second_run = _second_run(segment.context, ctx.microbatch)
        with second_run, torch.enable_grad():
            with torch.autocast(segment.context.device.type, dtype=dtype, enabled=enabled):
                outputs = segment.run(dict(zip(segment.inputs, leaves, strict=True)))
            pairs = zip(map(outputs.__getitem__, segment.outputs), grads, strict=True)
            made = [(y, grad) for y, grad in pairs if grad is not None and y.requires_grad]
            torch.autograd.backward([y for y, _ in made], [grad for _, grad in made])
        return None, None, *(leaf.grad for leaf in leaves)


@contextlib.contextmanager
def _second_run(context: Context, microbatch: int) -> Iterator[None]:
    # Running statistics stay as they are, and random numbers are those of the microbatch.
    context.recomputing, before = True, context.microbatch
    context.microbatch = microbatch
    try:
        yield
    finally:
        context.recomputing, context.microbatch = False, before


def _in_place(
    nodes: list[Node], outputs: list[str], extents: dict[str, list[list[int]]]
) -> set[str]:
    # Nodes, such as ReLUs, that may write their value over their input: no other node reads it, the
    # backward pass of its maker does not either, and the tile holds the same pixels of both.
    readers = Counter(name for node in nodes for name in node.inputs)
    makers = {node.name: node for node in nodes}
    chosen = set()
    for node in nodes:
        source = makers.get(node.inputs[0]) if facts_of(node.kind).in_place else None
        if source is not None and facts_of(source.kind).overwritable:
            free = readers[source.name] == 1 and source.name not in outputs
            if free and extents.get(source.name) == extents.get(node.name):
                chosen.add(node.name)
    return chosen


def _overwriting(node: Node) -> Operator:
    [source], overwrite = node.inputs, getattr(torch.ops.aten, f"{node.kind}_")
    return lambda values: overwrite(values[source])
