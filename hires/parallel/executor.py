"""Executes the events of a rank: one method for each kind, and no order of its own.

``hires.plan.program.events`` lists them, and the proof has walked the same list. Between passes the
executor takes one event after the other; inside a pass the operators do (``parallel.cursor``):

    event       recv B0   wait_recv F0   read F0   forward F0 ............ send   end F0   ...
    state                 arrived[F0]    batch     | halos, statistics |   made
                                                   flights[0]: inputs, outputs and loss for B0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.comm import finish_streams
from hires.core.errors import RunError
from hires.core.ranks import timeline
from hires.core.ranks.timeline import Recorder
from hires.parallel.context import Context
from hires.parallel.gradients import GradientSync
from hires.parallel.halo import new_map, part
from hires.parallel.loss import loss_of
from hires.parallel.loss_scale import LossScale
from hires.parallel.map_views import from_map, to_map
from hires.parallel.published_parameters import PublishedParameters
from hires.parallel.stage import StageModule
from hires.plan.event import Event
from hires.plan.factors import Dims, map_shape, unpack
from hires.plan.graph import INPUT
from hires.plan.layout import Box

Batch = tuple[Tensor | None, Tensor | None]
"""Images (n, C, h, w) for ranks that read them; for ranks of the last stage the target: labels (n),
or images of the size of the output."""
NOTHING: Batch = (None, None)
Feed = Sequence[Iterator[Batch]]  # the microbatches of each direction
Arrived = list[tuple[Event, Tensor]]  # receives and the tensors that they filled
See = Callable[[Context, Tensor], None]


class Flight(NamedTuple):
    """A microbatch between its forward and its backward pass."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: Tensor | None


@dataclass
class StepResult:
    """Results of a step on one rank, by microbatch of its replica."""

    losses: dict[int, Tensor] = field(default_factory=dict)  # on ranks that see the output
    outputs: dict[int, Tensor] = field(default_factory=dict)  # of the network, if kept
    loss_scale: float | None = None  # of this step; None: losses are not scaled
    skipped: bool = False  # whether gradients overflowed, so that no parameter moved

    @property
    def loss(self) -> float | None:
        """Mean of the losses; None on ranks that see no output."""
        return float(torch.stack([*self.losses.values()]).mean()) if self.losses else None


class Executor:
    """Runs steps of one rank, on its slots, one a direction.

    ``sync`` is None in inference, ``optimiser`` (``hires.engine.optimizer``, which imports this
    package) if there are no parameters to move, ``scale`` where losses are not scaled,
    ``published`` where no update is divided.
    """

    def __init__(
        self,
        slots: list[SlotPass],
        sync: GradientSync | None,
        optimiser: Any,
        recorder: Recorder,
        scale: LossScale | None = None,
        published: PublishedParameters | None = None,
    ) -> None:
        self.slots, self.sync, self.scale = slots, sync, scale
        self.optimiser, self.recorder = optimiser, recorder
        self.plan, self.cursor = slots[0].context.plan, slots[0].context.cursor
        self.methods: dict[str, Callable[[Event], None]] = {
            "read": self._read,
            "forward": self._forward,
            "send": self._send,
            "recv": self._receive,
            "wait_recv": self._wait_receives,
            "wait_sends": self._wait_sends,
        }
        if sync is not None:
            self.methods |= {
                "begin": self._begin,
                "backward": self._backward,
                "issue": sync.start,
                "collective": self._timed(sync.add_up),
                "wait_issued": self._timed(sync.finish),
                "reduce_scatter": self._timed(sync.scatter),
                "statistics": self._timed(sync.update_statistics),
                "agree": self._timed(self._agree),
                "optimise": self._optimise,
            }
        if published is not None:
            self.methods["publish"] = self._timed(published.publish)
            self.methods["all_gather"] = self._timed(published.gather)

    def begin(self, agree: Callable[[], bool]) -> bool:
        """Executes the barrier before a step: a collective with the same answer on all ranks."""
        self.cursor.restart()
        event = next(iter(self.cursor))
        assert event.kind == "barrier", event
        return agree()

    def step(
        self, feed: Feed, keep_outputs: bool = False, number: int = 0, see: See | None = None
    ) -> StepResult:
        """Runs all microbatches of one step, behind its barrier; the parameters move.

        In the last stage ``see`` gets the output of each microbatch when it is computed.
        Without :meth:`begin` there is no barrier: then the caller has brought the ranks together.
        Random numbers follow from the ``number`` of the step.
        """
        if self.cursor.at != 1:
            self.begin(lambda: True)
        self.recorder.begin_step()
        self.feed, self.keep_outputs, self.see = feed, keep_outputs, see
        self.result = StepResult()
        for slot in self.slots:
            slot.context.step = number
            if slot.module.buffers.written:
                with self.recorder.span(timeline.OPTIMISER, what="the buffers that passes find"):
                    slot.begin_step()
            if self.scale is not None:
                slot.loss_scale = self.result.loss_scale = self.scale.scale
        # What the next pass takes, and what passes leave for later events.
        self.batch = NOTHING
        self.flights: dict[int, Flight] = {}
        self.arrived: dict[str, Arrived] = {}
        self.made: dict[str, Tensor] = {}
        for event in self.cursor:
            self._execute(event)
        for slot in self.slots:
            slot.module.buffers.end_step()
        finish_streams()
        self.cursor.restart()
        return self.result

    def _execute(self, event: Event) -> None:
        # Between passes, or inside one where the operators leave events to the executor.
        if event.part.node and event.kind != "issue":
            raise RunError(f"a pass has ended before {event.what}, which the plan has inside it")
        self.methods[event.kind](event)

    def _begin(self, event: Event) -> None:
        assert self.sync is not None
        if self.optimiser is not None:
            self.optimiser.zero_grad()
        self.sync.begin_step()

    def _read(self, event: Event) -> None:
        with self.recorder.span(timeline.DATA, event.part.action):
            self.batch = next(self.feed[self._slot(event).context.direction])

    def _forward(self, event: Event) -> None:
        slot, action, microbatch = self._slot(event), event.part.action, int(event.part.action[1:])
        batch, self.batch = self.batch, NOTHING
        slot.context.microbatch = microbatch
        with self.recorder.span(timeline.FORWARD, action):
            if self.sync is not None:
                self.sync.before_forward(slot.context.direction)
            flight = slot.forward(self.arrived.pop(action, []), batch)
            if self.sync is not None:
                self.sync.after_forward(slot.context.direction, microbatch)
            self._to_end(flight.outputs)
        if flight.loss is not None:
            self.result.losses[microbatch] = flight.loss.detach()
        if slot.is_last and (self.keep_outputs or self.see is not None):
            output = flight.outputs[self.plan.graph.output].detach()
            if self.see is not None:
                self.see(slot.context, output)
            if self.keep_outputs:
                self.result.outputs[microbatch] = output
        if self.plan.training:
            self.flights[microbatch] = flight

    def _backward(self, event: Event) -> None:
        assert self.sync is not None
        action = event.part.action
        self.sync.ready.clear()  # the pass makes its gradients again
        with self.recorder.span(timeline.BACKWARD, action):
            # Taken out of the table: autograd frees the pass's activations while it goes back.
            flight = self.flights.pop(int(action[1:]))
            gradients = self._slot(event).backward(flight, self.arrived.pop(action, []))
            self._to_end(gradients)

    def _to_end(self, made: dict[str, Tensor]) -> None:
        # What is left of a pass when it is computed: its sends.
        self.made = made
        for event in self.cursor:
            if event.kind == "end":
                break
            self._execute(event)
        self.made = {}

    # A receive is posted long before its wait, so that the message travels while the rank computes:
    # how long before is in the plan.
    def _receive(self, event: Event) -> None:
        dtype: torch.dtype = getattr(torch, event.dtype)
        self.cursor.post(event, self._slot(event).empty(event.shape, dtype))

    def _send(self, event: Event) -> None:
        self.cursor.post(event, self._slot(event).sent(event, self.made))

    def _wait_receives(self, event: Event) -> None:
        # This message and those that are waited for directly after it are one span of the timeline:
        # a join of 16 tiles would draw 16.
        action, waits, cursor = event.part.action, [event], self.cursor
        while (later := cursor.events[cursor.at]).kind == "wait_recv":
            if later.part.action != action:
                break
            waits.append(later)
            cursor.at += 1
        peers = sorted({wait.peer for wait in waits})
        with self.recorder.span(timeline.WAIT, action, f"from {', '.join(map(str, peers))}"):
            self.arrived.setdefault(action, []).extend(cursor.wait(wait) for wait in waits)

    def _wait_sends(self, event: Event) -> None:
        with self.recorder.span(timeline.WAIT, what="its sends"):
            self.cursor.wait_sends()

    def _timed(self, method: Callable[[Event], None]) -> Callable[[Event], None]:
        def call(event: Event) -> None:
            with self.recorder.span(timeline.GRADIENTS):
                method(event)

        return call

    def _agree(self, event: Event) -> None:
        assert self.sync is not None
        assert self.scale is not None
        self.scale.agree(self.sync.gradients())
        self.result.skipped = self.scale.skips
        self.scale.update()

    def _optimise(self, event: Event) -> None:
        if self.optimiser is not None:
            with self.recorder.span(timeline.OPTIMISER):
                self.optimiser.reserve() if self.result.skipped else self.optimiser.step()

    def _slot(self, event: Event) -> SlotPass:
        return self.slots[self.plan.direction_of(event.part.action)]


class SlotPass:
    """The passes of one slot: its stage's tile, in one direction.

    The last stage computes the ``loss`` in training; ``autocast`` is the type to which matrix
    products are lowered.
    """

    def __init__(
        self, context: Context, module: StageModule, loss: str, autocast: torch.dtype | None = None
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
        own, travels = context.dtype, context.sent_dtype
        self.dtype = own if autocast is None else torch.promote_types(own, travels)
        """Of what arrived: autocast lowers it at the products, and not before."""
        self.is_last = stage == len(plan.stages) - 1
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
        with torch.set_grad_enabled(plan.training), self._casting():
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
            tensor = to_map(tensor, dims, held[2:])
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
        box = (held.n1 - held.n0, *shape[1:]) if shape else ()
        if len(shape) == 4:
            box = held.n1 - held.n0, shape[1], held.r1 - held.r0, held.c1 - held.c0
        travels: torch.dtype = getattr(torch, self.context.plan.dtype_of(value))
        dtype = self.dtype if travels.is_floating_point else travels  # numbers, masks and indices
        whole = self._assembled(held, box, pieces, add, dtype)
        return whole if dims is None else from_map(whole, dims, held[2:])

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
    n0, n1 = event.box[:2]
    if (held.n0, held.n1) != (n0, n1) and tensor.dim():
        tensor = tensor[n0 - held.n0 : n1 - held.n0]
    return tensor if event.rect is None else part(tensor, held[2:], event.rect)
