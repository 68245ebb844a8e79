"""Executes the events of a rank: one method for each kind, and no order of its own.

``hires.plan.program.events`` lists them, and the proof has walked the same list. Between passes the
executor takes one event after the other; inside a pass the operators do (``parallel.cursor``):

    event       recv B0   wait_recv F0   read F0   forward F0 ............ send   end F0   ...
    state                 arrived[F0]    batch     | halos, statistics |   made
                                                   flights[0]: inputs, outputs and loss for B0

A receive is posted long before its wait, so that the message travels while the rank computes; the
plan says how long before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hires.core.errors import RunError
from hires.core.ranks import timeline
from hires.core.ranks.timeline import Recorder
from hires.parallel.gradients import GradientSync
from hires.parallel.slot_pass import Batch, Flight, SlotPass
from hires.plan.event import Event

NOTHING: Batch = (None, None)


class _Feed(Protocol):
    def next_microbatch(self, direction: int = 0) -> Batch: ...


class _Optimiser(Protocol):
    def zero_grad(self) -> None: ...
    def step(self) -> None: ...


@dataclass
class StepResult:
    """What one step of a rank gives, by microbatch of its replica."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    """On ranks that see the output."""
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """The network's output, if it was asked for."""

    @property
    def loss(self) -> float | None:
        """Mean of the losses; None on ranks that see no output."""
        return float(torch.stack([*self.losses.values()]).mean()) if self.losses else None


class Executor:
    """Runs steps of one rank.

    Args:
        slots: the rank's slots, one a direction.
        sync: sums the gradients; None in inference.
        optimiser: moves the parameters; None if there are none to move.
        recorder: keeps when what happened.
    """

    def __init__(
        self,
        slots: list[SlotPass],
        sync: GradientSync | None = None,
        optimiser: _Optimiser | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.slots = slots
        self.plan = slots[0].context.plan
        self.cursor = slots[0].context.cursor
        self.sync = sync
        self.optimiser = optimiser
        self.recorder = recorder or Recorder()
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
                "statistics": self._timed(sync.update_statistics),
                "optimise": self._optimise,
            }

    def begin(self, agree: Callable[[], bool]) -> bool:
        """Executes the barrier before a step; returns what all ranks agree on.

        Args:
            agree: a collective of all ranks that gives all of them the same answer.
        """
        self.cursor.restart()
        event = next(iter(self.cursor))
        assert event.kind == "barrier", event
        return agree()

    def step(self, feed: _Feed, keep_outputs: bool = False) -> StepResult:
        """Runs all microbatches of one step, behind its barrier; the parameters move.

        Without :meth:`begin` there is no barrier: then the caller has brought the ranks together.
        ``keep_outputs``: the network's output becomes part of the result.
        """
        if self.cursor.at != 1:
            self.begin(lambda: True)
        self.recorder.begin_step()
        self.feed, self.keep_outputs = feed, keep_outputs
        self.result = StepResult()
        # What the next pass takes, and what passes leave for later events.
        self.batch = NOTHING
        self.flights: dict[int, Flight] = {}
        self.arrived: dict[str, list[tuple[Event, Tensor]]] = {}
        self.made: dict[str, Tensor] = {}
        for event in self.cursor:
            self._execute(event)
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
            self.batch = self.feed.next_microbatch(self._slot(event).context.direction)

    def _forward(self, event: Event) -> None:
        slot, action, microbatch = self._slot(event), event.part.action, int(event.part.action[1:])
        batch, self.batch = self.batch, NOTHING
        with self.recorder.span(timeline.FORWARD, action):
            if self.sync is not None:
                self.sync.before_forward(slot.context.direction)
            flight = slot.forward(self.arrived.pop(action, []), batch)
            if self.sync is not None:
                self.sync.after_forward(slot.context.direction, microbatch)
            self._to_end(flight.outputs)
        if flight.loss is not None:
            self.result.losses[microbatch] = flight.loss.detach()
        if self.keep_outputs and slot.is_last:
            output = flight.outputs[self.plan.graph.output]
            self.result.outputs[microbatch] = output.detach()
        if self.plan.training:
            self.flights[microbatch] = flight

    def _backward(self, event: Event) -> None:
        assert self.sync is not None
        action = event.part.action
        self.sync.begin_backward()
        with self.recorder.span(timeline.BACKWARD, action):
            # Taken out of the table: autograd frees the pass's activations while it goes back.
            flight = self.flights.pop(int(action[1:]))
            gradients = self._slot(event).backward(flight, self.arrived.pop(action, []))
            self._to_end(gradients)

    def _to_end(self, made: dict[str, Tensor]) -> None:
        """Executes what is left of a pass when it is computed: its sends, up to its end."""
        self.made = made
        for event in self.cursor:
            if event.kind == "end":
                break
            self._execute(event)
        self.made = {}

    def _receive(self, event: Event) -> None:
        self.cursor.post(event, self._slot(event).empty(event.shape))

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

    def _optimise(self, event: Event) -> None:
        if self.optimiser is not None:
            with self.recorder.span(timeline.OPTIMISER):
                self.optimiser.step()

    def _slot(self, event: Event) -> SlotPass:
        return self.slots[self.plan.direction_of(event.part.action)]
