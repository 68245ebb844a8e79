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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hires.nets.build_network import constant_tensor
from hires.parallel.buffer_states import BufferStates
from hires.parallel.compile_node import compile_node
from hires.parallel.compiled_region import CompiledRegion, NodeSteps, See, Step
from hires.parallel.context import Context
from hires.parallel.image_kernels import Operator, Values
from hires.plan.graph import INPUT, Node
from hires.plan.operators.operator_facts import facts_of
from hires.plan.regions import Region
from hires.plan.rules import TILED


class StageModule:
    """The nodes of one stage on one rank; ``tensors`` are its parameters and buffers by name.

    Each of the ``regions`` can be compiled.
    """

    def __init__(
        self, context: Context, tensors: dict[str, Tensor], regions: Sequence[Region] = ()
    ) -> None:
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
        self.buffers = BufferStates(context, self.nodes, self.tensors)
        self.segments = self._segments(context, regions)
        self.regions = [region for segment in self.segments for region in segment.regions]
        self.recomputes = bool(stage.segments)
        self._see: See | None = None
        # Parameters of tiled values have a part of their gradient on each tile. Behind the global
        # pool every tile has all of it. A shard has its samples' part of every gradient.
        partial = [n for n in self.nodes if stage.shards > 1 or stage.layout[n.name] == TILED]
        self.partial = self.parameters.keys() & {name for n in partial for name in n.params}

    def _segments(self, context: Context, regions: Sequence[Region]) -> list[Segment]:
        plan, stage = context.plan, context.stage
        bounds = stage.segments or [stage.first, stage.last]
        pairs = [*itertools.pairwise(bounds)]
        parts = [plan.graph.nodes[a:b] for a, b in pairs]
        within = [[r for r in regions if a <= r.first < b] for a, b in pairs]
        reads = [{name for node in nodes for name in node.inputs} for nodes in parts]
        return [
            Segment(
                context,
                nodes,
                self.buffers,
                self.tensors,
                set(self.outputs).union(*reads[i + 1 :]),
                within[i],
            )
            for i, nodes in enumerate(parts)
        ]

    def watch(self, see: See | None) -> None:
        """Lets ``see`` get every value that the stage reads as images or makes; None: no more.

        Nodes that are compiled show theirs only while they run one by one.
        """
        self._see = see
        for segment in self.segments:
            segment.watch(see)

    def forward(self, inputs: Values) -> dict[str, Tensor]:
        """Returns the values that leave the stage, from those that enter it."""
        if self._see is not None and INPUT in inputs:
            self._see(INPUT, inputs[INPUT])
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
    """Consecutive nodes of a stage, with its regions among them.

    ``later`` are the values that are read behind them.
    """

    def __init__(
        self,
        context: Context,
        nodes: list[Node],
        buffers: BufferStates,
        tensors: dict[str, Tensor],
        later: set[str],
        regions: Sequence[Region] = (),
    ) -> None:
        self.context = context
        made = {node.name for node in nodes}
        self.outputs = [node.name for node in nodes if node.name in later]
        reads = dict.fromkeys(name for node in nodes for name in node.inputs)
        self.inputs = [name for name in reads if name not in made]
        first = context.plan.graph.position[nodes[0].name] if nodes else 0
        bounds = [(region.first - first, region.last - first) for region in regions]
        compiled = {nodes[index].name for span in bounds for index in range(*span)}
        over = overwriting_nodes(nodes, self.outputs, context.stage.extents, compiled)
        last_use = {name: index for index, node in enumerate(nodes) for name in node.inputs}
        steps: list[Step] = []
        for index, node in enumerate(nodes):
            overwrites, packers = node.name in over, len(context.packers)
            in_place = overwrites and facts_of(node.kind).in_place
            run = overwriting(node) if in_place else buffers.reader(node)
            run = run or compile_node(node, context, tensors, overwrites)
            if node.name in compiled:  # the compiler keeps weights in an order of its own
                del context.packers[packers:]
            dead = [n for n in node.inputs if last_use[n] == index and n not in self.outputs]
            steps.append((node, run, dead))
        self.regions: list[CompiledRegion] = []
        self._parts: list[NodeSteps | CompiledRegion] = []
        end = 0
        for begin, last in bounds:
            later = {n for n in compiled if last_use.get(n, -1) >= last or n in self.outputs}
            self.regions.append(CompiledRegion(steps[begin:last], later))
            self._parts += [NodeSteps(steps[end:begin]), self.regions[-1]]
            end = last
        self._parts.append(NodeSteps(steps[end:]))

    def watch(self, see: See | None) -> None:
        """Lets ``see`` get the values of its nodes, but for those of regions."""
        for part in self._parts:
            if isinstance(part, NodeSteps):
                part.see = see

    def run(self, values: Values) -> dict[str, Tensor]:
        """Returns the outputs from the inputs; ``values`` is used up."""
        for part in self._parts:
            part.run(values)
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


def overwriting_nodes(
    nodes: list[Node], outputs: list[str], extents: dict[str, list[list[int]]], compiled: set[str]
) -> set[str]:
    """Returns the nodes that may write their value over an operand.

    They are ReLUs and their like, over their input, and fused operators, over the value beside
    their window. They are its last reader, the backward pass of its maker does not read it, no
    value of an earlier reader lies in its memory, and the tile holds the same pixels of both. A
    compiled node may read anything, and has no need to.
    """
    makers = {node.name: node for node in nodes}
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    chosen = set()
    for node in nodes:
        facts = facts_of(node.kind)
        operand = node.args.get(facts.residual_arg) if facts.residual_arg else None
        name = operand["value"] if operand else node.inputs[0] if facts.in_place else ""
        if name not in makers or not facts_of(makers[name].kind).overwritable or name in outputs:
            continue
        *before, last = readers[name]
        kinds = [facts_of(one.kind) for one in before]
        apart = all(f.overwritable or (f.window is not None and f.window.pads) for f in kinds)
        alone = apart and name != node.inputs[0] if facts.residual_arg else not before
        same = extents.get(name) == extents.get(node.name)
        if last is node and alone and same and compiled.isdisjoint([name, node.name]):
            chosen.add(node.name)
    return chosen


def overwriting(node: Node) -> Operator:
    """Returns what writes the value of a node over its input."""
    [source], overwrite = node.inputs, getattr(torch.ops.aten, f"{node.kind}_")
    return lambda values: overwrite(values[source])
