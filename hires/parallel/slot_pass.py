"""Computes the passes of one slot from what arrived, and gives views of what it sends."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.halo import new_map, part
from hires.parallel.loss import loss_of
from hires.parallel.stage import StageModule
from hires.plan.event import Event
from hires.plan.graph import INPUT
from hires.plan.layout import Box

Batch = tuple[Tensor | None, Tensor | None]
"""Images (n, C, h, w) for ranks that read them; for ranks of the last stage the target: labels (n),
or images of the size of the output."""
Arrived = list[tuple[Event, Tensor]]
"""Receives and the tensors that they filled."""


@dataclass
class Flight:
    """A microbatch between its forward and its backward pass."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: Tensor | None


class SlotPass:
    """The passes of one slot: its stage's tile, in one direction.

    Args:
        context: the slot.
        module: its stage.
        loss: name of the loss, which the last stage computes in training.
        autocast: type to which autocast lowers matrix products in training, or None.
    """

    def __init__(
        self, context: Context, module: StageModule, loss: str, autocast: torch.dtype | None = None
    ) -> None:
        self.context = context
        self.module = module
        self.loss = loss
        self.autocast = autocast
        plan, stage = context.plan, context.stage.index
        self.edges_in = {edge.value: edge for edge in plan.edges if edge.target == stage}
        self.edges_out = [edge for edge in plan.edges if edge.source == stage]
        self.is_last = stage == len(plan.stages) - 1
        self.reads_images = any(INPUT in node.inputs for node in module.nodes)

    def forward(self, arrived: Arrived, batch: Batch) -> Flight:
        """Computes the stage, and the loss in the last one."""
        images, target = batch
        plan = self.context.plan
        inputs = {value: self._joined(value, arrived) for value in self.edges_in}
        for value, edge in self.edges_in.items():
            inputs[value].requires_grad_(bool(edge.back))
        leaves = dict(inputs)
        if self.reads_images:
            assert images is not None
            leaves[INPUT] = images
        low = self.autocast
        casting = torch.autocast("cpu", dtype=low) if low else contextlib.nullcontext()
        with torch.set_grad_enabled(plan.training), casting:
            outputs = self.module.forward(leaves)
        loss = None
        if self.is_last and plan.training:
            assert target is not None
            loss = loss_of(self.loss, outputs[plan.graph.output], target, self.context)
        return Flight(inputs, outputs, loss)

    def backward(self, flight: Flight, arrived: Arrived) -> dict[str, Tensor]:
        """Runs autograd from the stage's outputs; returns the gradients of its inputs."""
        # An output may have readers in several stages, and a pixel of it on several of their tiles:
        # its gradient is the sum of all that arrived.
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for value in {edge.value: None for edge in self.edges_out if edge.back}:
            roots.append(flight.outputs[value])
            total = self._joined(value, arrived, add=True)
            gradients.append(total.to(flight.outputs[value].dtype))
        if flight.loss is not None:
            # The mean over all microbatches of all replicas: later sums need no division.
            roots.append(flight.loss / self.context.plan.pieces)
            gradients.append(None)
        torch.autograd.backward(roots, gradients)
        leaves = {v: flight.inputs[v] for v, edge in self.edges_in.items() if edge.back}
        return {
            value: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for value, leaf in leaves.items()
        }

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Returns an uninitialised tensor; an image lies in channels-last order."""
        like = torch.empty(0, dtype=self.context.dtype)
        return new_map(like, shape) if len(shape) == 4 else like.new_empty(shape)

    def sent(self, send: Event, made: dict[str, Tensor]) -> Tensor:
        """Returns what a send takes of the values or gradients that a pass has made."""
        tensor = _view(made[send.value].detach(), self.context.held(send.value), send)
        return tensor.to(self.context.dtype)

    def _joined(self, value: str, arrived: Arrived, add: bool = False) -> Tensor:
        # This slot's part of a value, or of its gradient. Where one message brings all of it, its
        # buffer is the value: nothing is copied.
        pieces = [(event, tensor) for event, tensor in arrived if event.value == value]
        held, shape = self.context.held(value), self.context.plan.graph.shape(value)
        box = (held.n1 - held.n0, *shape[1:]) if shape else ()
        if len(shape) == 4:
            box = held.n1 - held.n0, shape[1], held.r1 - held.r0, held.c1 - held.c0
        if len(pieces) == 1 and pieces[0][1].shape == box:
            return pieces[0][1]
        whole = self.empty(box)
        if add:
            whole.zero_()
        for event, tensor in pieces:
            view = _view(whole, held, event)
            if add:
                view.add_(tensor)
            else:
                view.copy_(tensor)
        return whole


def _view(tensor: Tensor, held: Box, event: Event) -> Tensor:
    # The samples and pixels of a message in a tensor that holds a box.
    n0, n1 = event.box[:2]
    if (held.n0, held.n1) != (n0, n1) and tensor.dim():
        tensor = tensor[n0 - held.n0 : n1 - held.n0]
    return tensor if event.rect is None else part(tensor, held[2:], event.rect)
