"""Computes a pass of one slot: from what arrived to the outputs, and back to the gradients.

The executor says when (:mod:`hires.parallel.executor`); here values in pieces become the inputs of
a stage, and what it made becomes the messages of its sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.core.codecs import JOIN, STAGE
from hires.core.config.training_config import LossConfig
from hires.core.losses import loss_named
from hires.parallel.context import Context
from hires.parallel.conversion_kernels import from_map, to_map
from hires.parallel.halo import new_map, part
from hires.parallel.loss import divides_output, loss_of
from hires.parallel.stage import StageModule
from hires.plan.event import Event
from hires.plan.factors import Dims, map_shape, unpack
from hires.plan.graph import INPUT
from hires.plan.plan import Box

Batch = tuple[Any, Tensor | None]
"""Images (n, C, h, w) for ranks that read them, or what reads rows of them; for ranks of the last
stage the target: labels (n), or images of the size of the output."""
NOTHING: Batch = (None, None)
Arrived = list[tuple[Event, Tensor]]  # receives and the tensors that they filled


class Flight(NamedTuple):
    """A microbatch between its forward and its backward pass."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: Tensor | None
    counts: Tensor | None
    """Whether a label of it counts; None: each does."""


class SlotPass:
    """The passes of one slot: its stage's tile, in one direction.

    The last stage computes the ``loss`` in training; ``autocast`` is the type to which matrix
    products are lowered.
    """

    def __init__(
        self,
        context: Context,
        module: StageModule,
        loss: LossConfig,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.context, self.module = context, module
        self.loss, self.autocast, self.loss_scale = loss, autocast, 1.0
        plan, stage = context.plan, context.stage.index
        self.edges_in = {edge.value: edge for edge in plan.edges if edge.target == stage}
        sent = (edge for edge in plan.edges if edge.source == stage and edge.back)
        self.roots = list(dict.fromkeys(edge.value for edge in sent))
        """Values whose gradient comes back."""
        crossing = (e for e in enumerate(plan.edges) if stage in (e[1].source, e[1].target))
        self.numbers = {edge.value: number for number, edge in crossing}
        """Of an edge that each value crosses."""
        own, coded = context.dtype, {*plan.codecs} & {STAGE, JOIN}
        self.dtype = torch.float32 if autocast is not None and coded else own
        """Of what arrived: autocast lowers it at the products, and not before."""
        self.keeping: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """In which a forward pass runs that is followed by a backward pass (:mod:`.spill`)."""
        self.is_last = stage == len(plan.stages) - 1
        if self.is_last and plan.training and divides_output(context):
            loss_named(loss).require_parts()
        self.reads_images = any(INPUT in node.inputs for node in module.nodes)

    def begin_step(self) -> None:
        """Computes the buffers that the microbatches of a step find."""
        with self._casting():
            self.module.buffers.begin_step()

    def _casting(self) -> torch.autocast:
        kind, low = self.context.device.type, self.autocast
        return torch.autocast(kind, dtype=low, enabled=low is not None)

    def forward(self, arrived: Arrived, batch: Batch) -> Flight:
        """Computes the stage, and the loss in the last one."""
        images, target = batch
        plan = self.context.plan
        inputs = {
            value: self._joined(value, arrived).requires_grad_(bool(edge.back))
            for value, edge in self.edges_in.items()
        }
        leaves = dict(inputs)
        if self.reads_images:
            assert images is not None
            leaves[INPUT] = images
        with torch.set_grad_enabled(plan.training), self._casting(), self.keeping():
            outputs = self.module.forward(leaves)
        loss = counts = None
        if self.is_last and plan.training:
            assert target is not None
            loss, counts = loss_of(self.loss, outputs[plan.graph.output], target, self.context)
        return Flight(inputs, outputs, loss, counts)

    def backward(self, flight: Flight, arrived: Arrived) -> dict[str, Tensor]:
        """Runs autograd from the stage's outputs; returns the gradients of its inputs."""
        # An output may have readers in several stages, and a pixel of it on several of their tiles:
        # its gradient is the sum of all that arrived.
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for value in self.roots:
            roots.append(flight.outputs[value])
            total = self._joined(value, arrived, add=True)
            gradients.append(total.to(flight.outputs[value].dtype))
        if flight.loss is not None:
            # The mean over all microbatches of all replicas: later sums need no division.
            mean = flight.loss / self.context.plan.pieces
            roots.append(mean if self.loss_scale == 1 else mean * self.loss_scale)
            gradients.append(None)
        torch.autograd.backward(roots, gradients)
        leaves = {v: leaf for v, leaf in flight.inputs.items() if leaf.requires_grad}
        return {v: torch.zeros_like(t) if t.grad is None else t.grad for v, t in leaves.items()}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised tensor; an image lies in channels-last order."""
        like = torch.empty(0, dtype=dtype, device=self.context.device)
        return new_map(like, shape) if len(shape) == 4 else like.new_empty(shape)

    def sent(self, send: Event, made: dict[str, Tensor]) -> Tensor:
        """Returns what a send takes of the values or gradients that a pass has made."""
        number = send.part.number
        tensor, held = made[send.value].detach(), self.context.held(send.value, number)
        if dims := self._dims(number, held):
            assert held.rect is not None, "a map has pixels"
            tensor = to_map(tensor, dims, held.rect)
        return _view(tensor, held, send).to(getattr(torch, send.dtype))

    def _dims(self, edge: int, held: Box) -> Dims | None:
        # Of a value whose map crosses an edge, for the samples that this slot holds.
        factors = self.context.plan.edges[edge].factors
        if not factors:
            return None
        (first, *others), *rest = unpack(factors)
        samples = held.n1 - held.n0
        return (first._replace(size=samples) if first.axis is None else first, *others), *rest

    def _joined(self, value: str, arrived: Arrived, add: bool = False) -> Tensor:
        # This slot's part of a value, or of its gradient. Where one message brings all of it, its
        # buffer is the value: nothing is copied.
        # Several edges may bring its gradient, as parts of different maps.
        by_map: dict[str, list[tuple[Event, Tensor]]] = {}
        for event, tensor in arrived:
            if event.value == value:
                key = str(self.context.plan.edges[event.part.number].factors)
                by_map.setdefault(key, []).append((event, tensor))
        if not by_map:  # nothing came, but zeros of its shape are wanted
            return self._joined_map(value, [], add, self.numbers[value])
        first, *others = (
            self._joined_map(value, pieces, add, pieces[0][0].part.number)
            for pieces in by_map.values()
        )
        return first + sum(others) if others else first

    def _joined_map(self, value: str, pieces: Arrived, add: bool, edge: int) -> Tensor:
        held = self.context.held(value, edge)
        dims = self._dims(edge, held)
        shape = self.context.plan.graph.shape(value) if dims is None else map_shape(dims)
        travels: torch.dtype = getattr(torch, self.context.plan.dtype_of(value))
        dtype = self.dtype if travels.is_floating_point else travels  # numbers, masks and indices
        whole = self._assembled(held, held.shape(shape), pieces, add, dtype)
        if dims is None:
            return whole
        assert held.rect is not None, "a map has pixels"
        return from_map(whole, dims, held.rect)

    def _assembled(
        self, held: Box, box: tuple[int, ...], pieces: Arrived, add: bool, dtype: torch.dtype
    ) -> Tensor:
        if len(pieces) == 1 and pieces[0][1].shape == box:
            return pieces[0][1].to(dtype)
        whole = self.empty(box, dtype)
        if add:
            whole.zero_()
        for event, tensor in pieces:
            view = _view(whole, held, event)
            view.add_(tensor) if add else view.copy_(tensor)
        return whole


def _view(tensor: Tensor, held: Box, event: Event) -> Tensor:
    # The samples and pixels of a message in a tensor that holds a box.
    assert event.box is not None
    n0, n1, rect = event.box
    if (held.n0, held.n1) != (n0, n1) and tensor.dim():
        tensor = tensor[n0 - held.n0 : n1 - held.n0]
    return tensor if rect is None or held.rect is None else part(tensor, held.rect, rect)
