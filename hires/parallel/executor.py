"""Executes the events of a rank: one method for each kind, and no order of its own.

``hires.plan.program.events`` lists them, and the proof has walked the same list. Between passes the
executor takes one event after the other; inside a pass the operators do (``parallel.cursor``):

    event       recv B0   wait_recv F0   read F0   forward F0 ............ send   end F0   ...
    state                 arrived[F0]    batch     | halos, statistics |   made
                                                   flights[0]: inputs, outputs and loss for B0
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hires.comm import finish_streams
from hires.core.errors import RunError
from hires.core.ranks import timeline
from hires.core.ranks.timeline import Recorder
from hires.parallel.band_module import BandModule
from hires.parallel.context import Context
from hires.parallel.cursor import SUMS
from hires.parallel.gradient_factors import GradientClip, LossScale
from hires.parallel.gradients import GradientSync
from hires.parallel.published_parameters import PublishedParameters
from hires.parallel.slot_pass import NOTHING, Arrived, Batch, Flight, SlotPass
from hires.plan.event import Event
from hires.plan.graph import Rect

Feed = Sequence[Iterator[Batch]]  # the microbatches of each direction
See = Callable[[Context, Tensor], None]


@dataclass
class StepResult:
    """Results of a step on one rank, by microbatch of its replica."""

    losses: dict[int, Tensor] = field(default_factory=dict)  # on ranks that see the output
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Whether a label of it counts, on one rank for each; nothing where each label does."""
    outputs: dict[int, Tensor] = field(default_factory=dict)  # of the network, if kept
    loss_scale: float | None = None  # of this step; None: losses are not scaled
    grad_norm: float | None = None  # before it was clipped; None: gradients are not clipped
    skipped: bool = False  # whether gradients overflowed, so that no parameter moved

    @property
    def loss(self) -> float | None:
        """Mean of the losses; None on ranks that see no output."""
        return float(torch.stack([*self.losses.values()]).mean()) if self.losses else None

    @property
    def unlabelled(self) -> int:
        """How many microbatches have no label that counts, over all ranks that have a number."""
        return sum(not bool(one) for one in self.counts.values())


class Executor:
    """Runs steps of one rank, on its slots, one a direction.

    ``sync`` is None in inference, ``optimiser`` (``hires.engine.optimizer``, which imports this
    package) if there are no parameters to move, ``scale`` where losses are not scaled,
    ``published`` where no update is divided, ``clip`` where gradients are not clipped.
    """

    def __init__(
        self,
        slots: list[SlotPass],
        sync: GradientSync | None,
        optimiser: Any,
        recorder: Recorder,
        scale: LossScale | None = None,
        published: PublishedParameters | None = None,
        clip: GradientClip | None = None,
    ) -> None:
        self.slots, self.sync, self.scale, self.clip = slots, sync, scale, clip
        self.published = published
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
                "grad_norm": self._timed(self._clip),
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
        Random numbers and the learning rate follow from the ``number`` of the step.
        """
        if self.cursor.at != 1:
            self.begin(lambda: True)
        self.recorder.begin_step()
        return self.run(feed, keep_outputs, number, see)

    def run(
        self, feed: Feed, keep_outputs: bool = False, number: int = 0, see: See | None = None
    ) -> StepResult:
        """Runs the events from where the rank is in the step to its end."""
        self.number = number
        self.feed, self.keep_outputs, self.see = feed, keep_outputs, see
        self.result = StepResult(loss_scale=None if self.scale is None else self.scale.scale)
        self._begin_passes()
        for event in self.cursor:
            self._execute(event)
        self._end_passes()
        self.cursor.restart()
        return self.result

    def _begin_passes(self) -> None:
        for slot in self.slots:
            slot.context.step = self.number
            if slot.module.buffers.written:
                with self.recorder.span(timeline.OPTIMISER, what="the buffers that passes find"):
                    slot.begin_step()
            if self.scale is not None:
                slot.loss_scale = self.scale.scale
        # What the next pass takes, and what passes leave for later events.
        self.batch = NOTHING
        self.flights: dict[int, Flight] = {}
        self.arrived: dict[str, Arrived] = {}
        self.made: dict[str, Tensor] = {}

    def _end_passes(self) -> None:
        for slot in self.slots:
            slot.module.buffers.end_step()
        finish_streams(self.cursor.world)

    def _execute(self, event: Event) -> None:
        # Between passes, or inside one where the operators leave events to the executor.
        if event.part.node and event.kind not in SUMS:
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
                self.sync.before_forward(slot.context)
            pieces: list[Tensor] = []
            if isinstance(slot.module, BandModule):
                slot.module.emit = functools.partial(self._emit, slot.context, pieces)
            flight = slot.forward(self.arrived.pop(action, []), batch)
            if self.sync is not None:
                self.sync.after_forward(slot.context, microbatch)
            self._to_end(flight.outputs)
        if flight.loss is not None:
            self.result.losses[microbatch] = flight.loss.detach()
        if flight.counts is not None and not slot.context.tile:
            self.result.counts[microbatch] = flight.counts
        if pieces:  # which were seen as they came
            self.result.outputs[microbatch] = torch.cat(pieces, 2)
        elif (output := flight.outputs.get(self.plan.graph.output)) is not None and slot.is_last:
            output = output.detach()
            if self.see is not None:
                self.see(slot.context, output)
            if self.keep_outputs:
                self.result.outputs[microbatch] = output
        if self.plan.training:
            self.flights[microbatch] = flight

    def _emit(self, context: Context, pieces: list[Tensor], rect: Rect, rows: Tensor) -> None:
        # Rows of an output that comes in bands.
        context.band = rect
        if self.see is not None:
            self.see(context, rows)
        if self.keep_outputs:
            pieces.append(rows)
        context.band = None

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

    def _clip(self, event: Event) -> None:
        assert self.clip is not None
        self.clip.clip()
        if not self.result.skipped:
            self.result.grad_norm = self.clip.norm

    def _optimise(self, event: Event) -> None:
        if self.optimiser is not None and not self.result.skipped:
            with self.recorder.span(timeline.OPTIMISER):
                if self.published is not None:
                    self.published.begin_update()
                self.optimiser.step(self.number)

    def _slot(self, event: Event) -> SlotPass:
        return self.slots[self.plan.direction_of(event.part.action)]
