"""How does a rank walk through its actions? Exactly as ``plan.program.events`` writes it down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hires.comm import Handle, irecv, isend
from hires.core.ranks.timeline import BACKWARD, DATA, FORWARD, WAIT, Recorder
from hires.parallel.context import Context
from hires.parallel.halo import new_map, part
from hires.parallel.loss import loss_of
from hires.parallel.stage import StageModule
from hires.plan.edges import Box
from hires.plan.graph import INPUT
from hires.plan.plan import Edge
from hires.plan.program import Message, edge_messages

Batch = tuple[Tensor | None, Tensor | None]
"""Images (n, C, h, w) for ranks that read them; for ranks of the last stage the target: labels (n),
or images of the size of the output."""


class Feed(Protocol):
    """Where microbatches come from."""

    def next_microbatch(self, direction: int = 0) -> Batch:
        """Returns the next microbatch of this rank's slot in a direction."""


class Observer(Protocol):
    """Who must know how far a step is."""

    def before_forward(self, direction: int) -> None:
        """A microbatch begins its forward pass."""

    def after_forward(self, direction: int, microbatch: int) -> None:
        """A microbatch has ended its forward pass."""

    def before_last_backward(self) -> None:
        """The next backward pass completes the gradients."""


@dataclass
class StepResult:
    """What one step told this rank, by microbatch of its replica."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    """On ranks that see the output."""
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """The network's output, if it was asked for."""

    @property
    def loss(self) -> float | None:
        """Mean of the losses that this rank knows; None if it knows none."""
        return float(torch.stack([*self.losses.values()]).mean()) if self.losses else None


@dataclass
class _Flight:
    """A microbatch between its forward and its backward pass."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: Tensor | None


class Executor:
    """Runs steps of one rank.

    Args:
        contexts: the rank's slots, one a direction.
        modules: what the rank computes in each.
        autocast: type to which autocast lowers matrix products in training, or None.
        observer: is told how far a step is.
        recorder: keeps when what happened.
    """

    def __init__(
        self,
        contexts: list[Context],
        modules: list[StageModule],
        autocast: torch.dtype | None = None,
        observer: Observer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        pairs = zip(contexts, modules, strict=True)
        self.slots = [SlotPass(context, module, autocast) for context, module in pairs]
        self.plan = contexts[0].plan
        self.actions = self.plan.actions_of(contexts[0].rank)
        self.observer = observer
        self.recorder = recorder or Recorder()

    def step(self, feed: Feed, keep_outputs: bool = False) -> StepResult:
        """Runs all microbatches of one step; gradients are added up in the parameters."""
        result = StepResult()
        flights: dict[int, _Flight] = {}
        sent: list[Handle] = []
        posted = {action: self._slot(action).post(action) for action in self.actions[:1]}
        for index, action in enumerate(self.actions):
            for later in self.actions[index + 1 : index + 2]:
                posted[later] = self._slot(later).post(later)
            received = self._wait(action, posted.pop(action))
            microbatch, slot = int(action[1:]), self._slot(action)
            if action[0] == "F":
                batch = self._read(slot, action, feed)
                with self.recorder.span(FORWARD, action):
                    flight = self._forward(slot, microbatch, received, batch)
                    sent += slot.send(action, flight.outputs)
                if flight.loss is not None:
                    result.losses[microbatch] = flight.loss.detach()
                if keep_outputs and slot.is_last:
                    result.outputs[microbatch] = flight.outputs[self.plan.graph.output].detach()
                if self.plan.training:
                    flights[microbatch] = flight
            else:
                if self.observer and index == len(self.actions) - 1:
                    self.observer.before_last_backward()
                with self.recorder.span(BACKWARD, action):
                    gradients = slot.backward(flights.pop(microbatch), received)
                    sent += slot.send(action, gradients)
        with self.recorder.span(WAIT, what="its sends"):
            for handle in sent:
                handle.wait()
        return result

    def _wait(
        self, action: str, posted: list[tuple[Handle, Message, Tensor]]
    ) -> list[tuple[Message, Tensor]]:
        """Returns what an action needs from other stages once it is there."""
        if not posted:
            return []
        peers = sorted({message.peer for _, message, _ in posted})
        with self.recorder.span(WAIT, action, f"from {', '.join(map(str, peers))}"):
            return wait_for(posted)

    def _slot(self, action: str) -> SlotPass:
        """Returns the slot that an action belongs to."""
        return self.slots[self.plan.direction_of(action)]

    def _read(self, slot: SlotPass, action: str, feed: Feed) -> Batch:
        """Returns the microbatch of an action."""
        with self.recorder.span(DATA, action):
            return feed.next_microbatch(slot.context.direction)

    def _forward(
        self, slot: SlotPass, microbatch: int, received: list[tuple[Message, Tensor]], batch: Batch
    ) -> _Flight:
        """Computes one forward pass."""
        direction = slot.context.direction
        if self.observer:
            self.observer.before_forward(direction)
        flight = slot.forward(received, batch)
        if self.observer:
            self.observer.after_forward(direction, microbatch)
        return flight


class SlotPass:
    """The passes of one slot, and the messages between its stage and the others."""

    def __init__(
        self, context: Context, module: StageModule, autocast: torch.dtype | None = None
    ) -> None:
        self.context = context
        self.module = module
        self.autocast = autocast
        plan, stage = context.plan, context.stage.index
        self.edges_in = {edge.value: edge for edge in plan.edges if edge.target == stage}
        self.edges_out = [edge for edge in plan.edges if edge.source == stage]
        self.is_last = stage == len(plan.stages) - 1
        self.reads_images = any(INPUT in node.inputs for node in module.nodes)

    def forward(self, received: list[tuple[Message, Tensor]], batch: Batch) -> _Flight:
        """Computes the stage, and the loss in the last one."""
        images, target = batch
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
            assert target is not None
            loss = loss_of(outputs[self.context.plan.graph.output], target, self.context)
        return _Flight(inputs, outputs, loss)

    def backward(
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

    def post(self, action: str) -> list[tuple[Handle, Message, Tensor]]:
        """Posts the receives of an action."""
        posted = []
        messages = self._messages(action, outgoing=False)
        for message in messages:
            buffer = self._empty(message.shape)
            posted.append((irecv(buffer, message.peer, message.tag), message, buffer))
        return posted

    def send(self, action: str, tensors: dict[str, Tensor]) -> list[Handle]:
        """Sends the values or gradients of an action."""
        handles = []
        messages = self._messages(action, outgoing=True)
        for message in messages:
            tensor = _view(tensors[message.value].detach(), self._held(message.value), message)
            handles.append(isend(tensor.to(self.context.dtype), message.peer, message.tag))
        return handles

    def _messages(self, action: str, outgoing: bool) -> list[Message]:
        """Returns the messages of an action, as the plan lists them."""
        return edge_messages(self.context.plan, self.context.rank, action, outgoing)

    def _held(self, value: str) -> Box:
        """Returns the part of a value that this slot holds."""
        return self.context.held(value)

    def _assemble(self, edge: Edge, received: list[tuple[Message, Tensor]]) -> Tensor:
        """Returns this slot's part of a value from the pieces that came for it."""
        pieces = [(m, tensor) for m, tensor in received if m.value == edge.value]
        held = self._held(edge.value)
        if len(pieces) == 1 and pieces[0][1].shape == self._shape(edge.value, held):
            return pieces[0][1]
        value = self._new(edge.value, held)
        for message, tensor in pieces:
            _view(value, held, message).copy_(tensor)
        return value

    def _gradient(self, value: str, received: list[tuple[Message, Tensor]]) -> Tensor:
        """Returns the gradient of one of the stage's outputs, summed over its readers."""
        pieces = [(m, tensor) for m, tensor in received if m.value == value]
        held = self._held(value)
        if len(pieces) == 1 and pieces[0][1].shape == self._shape(value, held):
            return pieces[0][1]
        total = self._new(value, held).zero_()
        for message, tensor in pieces:
            _view(total, held, message).add_(tensor)
        return total

    def _shape(self, value: str, held: Box) -> tuple[int, ...]:
        """Returns the shape of a part of a value."""
        shape = self.context.plan.graph.shape(value)
        if len(shape) != 4:
            return (held.n1 - held.n0, *shape[1:]) if shape else ()
        return held.n1 - held.n0, shape[1], held.r1 - held.r0, held.c1 - held.c0

    def _new(self, value: str, held: Box) -> Tensor:
        """Returns an uninitialised tensor for a part of a value."""
        return self._empty(self._shape(value, held))

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        """Returns an uninitialised tensor; an image lies in channels-last order."""
        like = torch.empty(0, dtype=self.context.dtype)
        return new_map(like, shape) if len(shape) == 4 else like.new_empty(shape)

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


def wait_for(posted: list[tuple[Handle, Message, Tensor]]) -> list[tuple[Message, Tensor]]:
    """Returns messages with their tensors once all have come."""
    for handle, _, _ in posted:
        handle.wait()
    return [(message, tensor) for _, message, tensor in posted]


def _view(tensor: Tensor, held: Box, message: Message) -> Tensor:
    """Returns the view of a message's samples and pixels in a tensor that holds a box."""
    if (held.n0, held.n1) != message.samples and tensor.dim():
        tensor = tensor[message.samples[0] - held.n0 : message.samples[1] - held.n0]
    return tensor if message.rect is None else part(tensor, held[2:], message.rect)


def _present(leaf: Tensor) -> Tensor:
    """Returns the gradient that a backward pass left in a stage's input."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
