"""What does one rank compute? Its stage's nodes, in order, on its tile."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from hires.parallel.context import Context
from hires.parallel.operators import Operator, Values, compile_node
from hires.plan.graph import Node
from hires.plan.rules import TILED

KEEPS_NO_RESULT = {"batch_norm", "conv2d", "add"}
"""Operators whose backward pass does not read their own value, so that a ReLU may overwrite it."""


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
        in_place = _in_place(self.nodes, self.outputs, stage.held)
        self.operators: list[tuple[str, Operator, list[str]]] = []
        last_use = _last_use(self.nodes)
        for index, node in enumerate(self.nodes):
            run = (
                _relu_(node) if node.name in in_place else compile_node(node, context, self.tensors)
            )
            ended = [n for n in node.inputs if last_use[n] == index and n not in self.outputs]
            self.operators.append((node.name, run, ended))
        self.partial = _partial(context, self.nodes, self.parameters)

    def forward(self, inputs: Values) -> dict[str, Tensor]:
        """Returns the values that leave the stage, from those that enter it.

        A value is let go after its last reader, so that only what autograd needs stays.
        """
        values = dict(inputs)
        for name, run, ended in self.operators:
            values[name] = run(values)
            for dead in ended:
                del values[dead]
        return {name: values[name] for name in self.outputs}


def _outputs(context: Context) -> list[str]:
    """Returns the values that a stage sends on, and the network's output in the last one."""
    plan, stage = context.plan, context.stage
    sent = [edge.value for edge in plan.edges if edge.source == stage.index]
    last = [plan.graph.output] if stage.index == len(plan.stages) - 1 else []
    return list(dict.fromkeys(sent + last))


def _last_use(nodes: list[Node]) -> dict[str, int]:
    """Returns the index of the last node that reads each value."""
    return {name: index for index, node in enumerate(nodes) for name in node.inputs}


def _in_place(nodes: list[Node], outputs: list[str], held: dict[str, list[list[int]]]) -> set[str]:
    """Returns the ReLUs that may overwrite their input: nobody else reads it, backward neither.

    Nor has it other pixels than theirs.
    """
    readers = Counter(name for node in nodes for name in node.inputs)
    makers = {node.name: node for node in nodes}
    chosen = set()
    for node in nodes:
        if node.kind == "relu" and node.inputs[0] in makers:
            source = makers[node.inputs[0]]
            free = readers[source.name] == 1 and source.name not in outputs
            free = free and held.get(source.name) == held.get(node.name)
            if free and source.kind in KEEPS_NO_RESULT:
                chosen.add(node.name)
    return chosen


def _relu_(node: Node) -> Operator:
    """Returns the ReLU that overwrites its input."""
    [source] = node.inputs
    return lambda values: torch.relu_(values[source])


def _partial(context: Context, nodes: list[Node], parameters: dict[str, nn.Parameter]) -> set[str]:
    """Returns the parameters whose gradient a tile sees only in part: those of tiled values.

    The gradient of a parameter behind the global pool is complete on every tile.
    """
    layout = context.stage.layout
    tiled = {name for node in nodes if layout[node.name] == TILED for name in node.params}
    return tiled & set(parameters)
