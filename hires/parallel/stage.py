"""Runs the nodes of one stage on one rank, in order, on its tile."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor, nn

from hires.parallel.compile_node import compile_node
from hires.parallel.context import Context
from hires.parallel.image_kernels import Operator, Values
from hires.parallel.recompute import Segment, run_segment
from hires.plan.graph import Node
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.rules import TILED


class StageModule:
    """The nodes of one stage on one rank.

    Args:
        context: the rank and its plan.
        model: the network; the parameters that the stage uses are real, the others may be on the
            meta device.
    """

    def __init__(self, context: Context, model: nn.Module) -> None:
        plan, stage = context.plan, context.stage
        self.nodes = plan.nodes(stage.index)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.tensors = {name: named[name] for node in self.nodes for name in node.params}
        self.parameters = {n: t for n, t in self.tensors.items() if isinstance(t, nn.Parameter)}
        self.outputs = _outputs(context)
        bounds = stage.segments or [stage.first, stage.last]
        parts = [plan.graph.nodes[a:b] for a, b in itertools.pairwise(bounds)]
        reads = [{name for node in nodes for name in node.inputs} for nodes in parts]
        self.segments = [
            _segment(context, nodes, self.tensors, set(self.outputs).union(*reads[i + 1 :]))
            for i, nodes in enumerate(parts)
        ]
        self.recomputes = bool(stage.segments)
        self.partial = _partial(context, self.nodes, self.parameters)

    def forward(self, inputs: Values) -> dict[str, Tensor]:
        """Returns the values that leave the stage, from those that enter it.

        A value is released after its last reader, so that only what autograd needs stays.
        """
        values = dict(inputs)
        for index, segment in enumerate(self.segments):
            if self.recomputes:
                values |= run_segment(segment, values)
            else:
                values |= segment.run({name: values[name] for name in segment.inputs})
            needed = {n for later in self.segments[index + 1 :] for n in later.inputs}
            values = {n: v for n, v in values.items() if n in needed or n in self.outputs}
        return {name: values[name] for name in self.outputs}


def _segment(
    context: Context, nodes: list[Node], tensors: dict[str, Tensor], later: set[str]
) -> Segment:
    """Returns some consecutive nodes as one callable.

    Args:
        context: the slot.
        nodes: what is computed.
        tensors: parameters and buffers of the stage by name.
        later: values that are read behind these nodes.
    """
    made = {node.name for node in nodes}
    outputs = [node.name for node in nodes if node.name in later]
    inputs = list(dict.fromkeys(n for node in nodes for n in node.inputs if n not in made))
    in_place = _in_place(nodes, outputs, context.stage.extents)
    last_use = {name: index for index, node in enumerate(nodes) for name in node.inputs}
    steps: list[tuple[str, Operator, list[str]]] = []
    for index, node in enumerate(nodes):
        overwrites = node.name in in_place
        run = _overwriting(node) if overwrites else compile_node(node, context, tensors)
        ended = [n for n in node.inputs if last_use[n] == index and n not in outputs]
        steps.append((node.name, run, ended))

    def run_all(values: Values) -> dict[str, Tensor]:
        for name, run, ended in steps:
            values[name] = run(values)
            for dead in ended:
                del values[dead]
        return {name: values[name] for name in outputs}

    random = any(is_random(node) for node in nodes)
    return Segment(context, run_all, inputs, outputs, random)


def _outputs(context: Context) -> list[str]:
    """Returns the values that a stage sends on, and the network's output in the last one."""
    plan, stage = context.plan, context.stage
    sent = [edge.value for edge in plan.edges if edge.source == stage.index]
    last = [plan.graph.output] if stage.index == len(plan.stages) - 1 else []
    return list(dict.fromkeys(sent + last))


def _in_place(
    nodes: list[Node], outputs: list[str], extents: dict[str, list[list[int]]]
) -> set[str]:
    """Returns the nodes, such as ReLUs, that may write their value over their input.

    No other node reads the input, the backward pass of its maker does not read it either, and the
    tile holds the same pixels of both.
    """
    readers = Counter(name for node in nodes for name in node.inputs)
    makers = {node.name: node for node in nodes}
    chosen = set()
    for node in nodes:
        if facts_of(node.kind).in_place and node.inputs[0] in makers:
            source = makers[node.inputs[0]]
            free = readers[source.name] == 1 and source.name not in outputs
            same_pixels = extents.get(source.name) == extents.get(node.name)
            if free and same_pixels and facts_of(source.kind).overwritable:
                chosen.add(node.name)
    return chosen


def _overwriting(node: Node) -> Operator:
    """Returns the in-place variant of an operator of one operand."""
    [source], overwrite = node.inputs, getattr(torch.ops.aten, f"{node.kind}_")
    return lambda values: overwrite(values[source])


def _partial(context: Context, nodes: list[Node], parameters: dict[str, nn.Parameter]) -> set[str]:
    """Returns the parameters whose gradient on this rank is a part of a sum over the tiles.

    These are the parameters of tiled values; behind the global pool every tile has the complete
    gradient. A shard has its samples' part of every gradient.
    """
    if context.stage.shards > 1:
        return set(parameters)
    layout = context.stage.layout
    tiled = {name for node in nodes if layout[node.name] == TILED for name in node.params}
    return tiled & set(parameters)
