"""Computes the buffers that a network writes in its forward pass, as one process would.

One process computes the microbatches of all replicas one after the other; each finds what the one
before has left. New values come from parameters and buffers alone, and parameters move at the end
of a step, so every rank computes the states of the step that its microbatches find:

    replica        0             1
    microbatch     0      1      0      1
    finds          s0     s1     s2     s3     end of the step: s4        s[i+1] = update(s[i])

So tiles, replicas and both directions find what one process does, whatever their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hires.nets.buffer_updates import READ
from hires.parallel.compile_node import compile_node
from hires.parallel.context import Context
from hires.parallel.image_kernels import Operator, Values
from hires.plan.graph import Node, update_nodes

State = dict[str, Tensor]


class BufferStates:
    """The written buffers of one stage on one rank; ``tensors`` are its tensors by name."""

    def __init__(self, context: Context, nodes: list[Node], tensors: dict[str, Tensor]) -> None:
        made = {node.name for node in nodes}
        updates = context.plan.graph.updates
        self._updates = {name: value for name, value in updates.items() if value in made}
        self._tensors, self._context = tensors, context
        self._steps = [
            (node.name, self.reader(node) or compile_node(node, context, tensors))
            for node in update_nodes(nodes, set(self._updates.values()))
        ]
        self._kept: dict[int, State] = {}  # by place in the step
        self._next: State | None = None  # from which an update is computed

    def reader(self, node: Node) -> Operator | None:
        """Returns what runs a node that reads a written buffer; None for other nodes."""
        name = node.params[0] if node.op == READ and node.params else ""
        if name not in self._updates:
            return None

        def read(values: Values) -> Tensor:
            state = self._kept[self._context.place] if self._next is None else self._next
            return state[name].clone()

        return read

    @property
    def written(self) -> bool:
        """Whether the stage writes any."""
        return bool(self._updates)

    def begin_step(self) -> None:
        """Computes the states of a step from the buffers and parameters at its begin."""
        if not self._updates:
            return
        plan, self._kept = self._context.plan, {}
        first = self._context.replica * plan.total_microbatches
        state = {name: self._tensors[name].detach().clone() for name in self._updates}
        with torch.no_grad():
            for place in range(plan.pieces):
                if first <= place < first + plan.total_microbatches:
                    self._kept[place] = state
                state = self._after(state)
        self._last = state

    def end_step(self) -> None:
        """Leaves in the buffers what the last microbatch of the step leaves there."""
        for name in self._updates:
            self._tensors[name].data.copy_(self._last[name])

    def _after(self, state: State) -> State:
        values: Values = {}
        self._next = state
        for name, run in self._steps:
            values[name] = run(values)
        self._next = None
        # Copies: a value may be a view of a parameter, which the optimiser changes before end_step.
        made = ((name, values[value]) for name, value in self._updates.items())
        return {n: value.to(self._tensors[n].dtype, copy=True) for n, value in made}
