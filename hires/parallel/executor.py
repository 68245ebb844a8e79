"""How does a rank walk through its actions? Exactly as ``plan.program.events`` writes it down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hires.comm import Handle, irecv, isend
from hires.parallel.context import Context
from hires.parallel.halo import new_map, part
from hires.parallel.loss import loss_of
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT
from hires.plan.plan import Edge
from hires.plan.program import Message, edge_messages

Batch = tuple[Tensor | None, Tensor | None]
"""Images (n, C, h, w) for ranks that read them, labels (n) for ranks of the last stage."""


class Feed(Protocol):
    """Where microbatches come from."""

    def next_microbatch(self) -> Batch:
        """Returns the next microbatch of this rank."""


@dataclass
class StepResult:
    """What one step told this rank."""

    loss: float | None = None
    """Mean over the replica's microbatches; None on ranks that do not see the output."""
    outputs: list[Tensor] = field(default_factory=list)
    """The network's output of each microbatch, if it was asked for."""


@dataclass
class _Flight:
    """A microbatch between its forward and its backward pass."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: Tensor | None


class Executor:
    """Runs steps of one rank.

    Args:
        context: the rank and its plan.
        module: what the rank computes.
        autocast: type to which autocast lowers matrix products in training, or None.
        on_last_backward: called before the backward pass that completes the gradients.
    """

    def __init__(
        self,
        context: Context,
        module: StageModule,
        autocast: torch.dtype | None = None,
        on_last_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self.context = context
        self.module = module
        self.autocast = autocast
        self.on_last_backward = on_last_backward
        plan, stage = context.plan, context.stage.index
        self.actions = plan.schedule[stage]
        self.edges_in = {edge.value: edge for edge in plan.edges if edge.target == stage}
        self.edges_out = [edge for edge in plan.edges if edge.source == stage]
        self.is_last = stage == len(plan.stages) - 1
        self.reads_images = any(INPUT in node.inputs for node in module.nodes)

    def step(self, feed: Feed, keep_outputs: bool = False) -> StepResult:
        """Runs all microbatches of one step; gradients are added up in the parameters."""
        result, losses = StepResult(), []
        flights: dict[str, _Flight] = {}
        sent: list[Handle] = []
        posted = {action: self._post(action) for action in self.actions[:1]}
        for index, action in enumerate(self.actions):
            posted |= {later: self._post(later) for later in self.actions[index + 1 : index + 2]}
            received = _wait(posted.pop(action))
            if action[0] == "F":
                flight = self._forward(received, feed.next_microbatch())
                sent += self._send(action, flight.outputs)
                if flight.loss is not None:
                    losses.append(flight.loss.detach())
                if keep_outputs and self.is_last:
                    result.outputs.append(flight.outputs[self.context.plan.graph.output].detach())
                if self.context.plan.training:
                    flights[action[1:]] = flight
            else:
                if index == len(self.actions) - 1:
                    self.on_last_backward()
                gradients = self._backward(flights.pop(action[1:]), received)
                sent += self._send(action, gradients)
        for handle in sent:
            handle.wait()
        if losses:
            result.loss = float(torch.stack(losses).mean())
        return result

    def _forward(self, received: list[tuple[Message, Tensor]], batch: Batch) -> _Flight:
        """Computes the stage, and the loss in the last one."""
        images, labels = batch
        inputs = {value: self._assemble(edge, received) for value, edge in self.edges_in.items()}
        for value, edge in self.edges_in.items():
            inputs[value].requires_grad_(bool(edge.back))
        leaves = dict(inputs)
        if self.reads_images:
            assert images is not None
            leaves[INPUT] = images
        with self._grad_mode(), self._casting():
            outputs = self.module.forward(leaves)
        loss = None
        if self.is_last and self.context.plan.training:
            assert labels is not None
            loss = loss_of(outputs[self.context.plan.graph.output], labels, self.context)
        return _Flight(inputs, outputs, loss)

    def _backward(
        self, flight: _Flight, received: list[tuple[Message, Tensor]]
    ) -> dict[str, Tensor]:
        """Runs autograd from the stage's outputs; returns the gradients of its inputs."""
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for value in {edge.value: None for edge in self.edges_out if edge.back}:
            roots.append(flight.outputs[value])
            gradients.append(self._gradient(value, received).to(flight.outputs[value].dtype))
        if flight.loss is not None:
            roots.append(flight.loss / self.context.plan.pieces)
            gradients.append(None)
        torch.autograd.backward(roots, gradients)
        backed = [value for value, edge in self.edges_in.items() if edge.back]
        return {value: _present(flight.inputs[value]) for value in backed}

    def _post(self, action: str) -> list[tuple[Handle, Message, Tensor]]:
        """Posts the receives of an action."""
        posted = []
        messages = edge_messages(self.context.plan, self.context.rank, action, outgoing=False)
        for message in messages:
            buffer = self._buffer(message)
            posted.append((irecv(buffer, message.peer, message.tag), message, buffer))
        return posted

    def _buffer(self, message: Message) -> Tensor:
        """Returns an uninitialised tensor for a message."""
        like = torch.empty(0, dtype=self.context.dtype)
        return (
            new_map(like, message.shape)
            if len(message.shape) == 4
            else like.new_empty(message.shape)
        )

    def _send(self, action: str, tensors: dict[str, Tensor]) -> list[Handle]:
        """Sends the values or gradients of an action."""
        handles = []
        messages = edge_messages(self.context.plan, self.context.rank, action, outgoing=True)
        for message in messages:
            tensor = tensors[message.value].detach()
            if message.rect is not None:
                origin = self.context.own(self.context.plan.graph.shape(message.value)[2:])
                tensor = part(tensor, origin, message.rect)
            handles.append(isend(tensor.to(self.context.dtype), message.peer, message.tag))
        return handles

    def _assemble(self, edge: Edge, received: list[tuple[Message, Tensor]]) -> Tensor:
        """Returns this tile's part of a value from the pieces that came for it."""
        pieces = [(m, tensor) for m, tensor in received if m.value == edge.value]
        if edge.whole:
            return pieces[0][1]
        shape = self.context.plan.graph.shape(edge.value)
        own = self.context.own(shape[2:])
        if len(pieces) == 1 and pieces[0][0].rect == own:
            return pieces[0][1]
        like = torch.empty(0, dtype=self.context.dtype)
        value = new_map(like, (*shape[:2], own[1] - own[0], own[3] - own[2]))
        for message, tensor in pieces:
            part(value, own, message.rect).copy_(tensor)
        return value

    def _gradient(self, value: str, received: list[tuple[Message, Tensor]]) -> Tensor:
        """Returns the gradient of one of the stage's outputs, summed over its readers."""
        pieces = [(m, tensor) for m, tensor in received if m.value == value]
        shape = self.context.plan.graph.shape(value)
        if any(m.rect is None for m, _ in pieces):
            return torch.stack([tensor for _, tensor in pieces]).sum(0)
        own = self.context.own(shape[2:])
        if len(pieces) == 1 and pieces[0][0].rect == own:
            return pieces[0][1]
        like = torch.empty(0, dtype=self.context.dtype)
        total = new_map(like, (*shape[:2], own[1] - own[0], own[3] - own[2])).zero_()
        for message, tensor in pieces:
            part(total, own, message.rect).add_(tensor)
        return total

    @contextlib.contextmanager
    def _casting(self) -> Iterator[None]:
        """Autocast in reduced-precision training."""
        if self.autocast is None:
            yield
            return
        with torch.autocast("cpu", dtype=self.autocast):
            yield

    def _grad_mode(self) -> contextlib.AbstractContextManager[None]:
        """Autograd in training only."""
        make: Callable[[bool], contextlib.AbstractContextManager[None]] = torch.set_grad_enabled
        return make(self.context.plan.training)


def _wait(posted: list[tuple[Handle, Message, Tensor]]) -> list[tuple[Message, Tensor]]:
    """Returns messages with their tensors once all have come."""
    for handle, _, _ in posted:
        handle.wait()
    return [(message, tensor) for _, message, tensor in posted]


def _present(leaf: Tensor) -> Tensor:
    """Returns the gradient that a backward pass left in a stage's input."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
