"""Walks a rank through the events of a step; all messages inside a step set out from here.

The executor and the operators share one position in one list. The executor runs the events between
passes. When it runs a pass, the operators come to their own events one after the other:

    events      recv B0 | forward F0 | post halo   wait halo   gather norm | send   end F0
    executor    -------------------->|                                     |-------------->
    operators                        |  conv1 ..... conv1 ....... bn1 .... |

So an operator decides when it communicates, and the plan what and in which order. An operator that
comes at another time than the plan has it ends the run, before a message can reach a wrong receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hires.comm import (
    CommWorld,
    Group,
    Handle,
    all_gather_stacked,
    all_reduce,
    default_world,
    end_call,
    post,
)
from hires.comm.backends.group_calls import Channels
from hires.comm.coding import decode, encode, usual_codec
from hires.core.errors import RunError
from hires.plan.event import POSTS, Event
from hires.plan.graph import Rect

WAITS = {"wait_send": "send", "wait_recv": "recv"}
SUMS = ("issue", "wait_issued")
"""Events inside a pass that come when gradients are complete, not where an operator is."""


class Cursor:
    """A rank's place in the events of one step, and its messages under way."""

    def __init__(
        self,
        events: Sequence[Event],
        groups: dict[int, Group],
        world: CommWorld | None = None,
        channels: Channels | None = None,
    ) -> None:
        self.events, self.world = events, world or default_world()
        self.channels = channels  # of the plan, where the backend has streams
        self.groups = groups  # of the rank, by their index in the plan
        self.at = 0
        # The sums that begin during a backward pass: GradientSync, which imports this module.
        self.sums: Any = None
        self.is_free = False  # whether this rank may begin them in an order of its own
        # With its tensor and what travels of it, by (kind, peer, tag), the oldest first: halos of
        # all microbatches have one tag, and messages of one tag between two ranks arrive in the
        # order of sending.
        self._open: dict[tuple[str, int, int], deque[tuple[Handle, Event, Tensor, Tensor]]] = {}

    def __iter__(self) -> Iterator[Event]:
        """Yields the events from here on; operators may take some of them in between."""
        while self.at < len(self.events):
            self.at += 1
            yield self.events[self.at - 1]

    def restart(self) -> None:
        """Goes back to the first event."""
        self.at = 0
        self._open.clear()

    def posts(self, node: str, back: bool) -> Iterator[Event]:
        """Yields the sends and receives with which a pass goes on at a node, if there are any."""
        while True:
            event = self._next()
            if event.kind not in POSTS or event.part.node != node or event.part.back != back:
                return
            self._take(event)
            yield event

    def post(self, event: Event, tensor: Tensor, group: Group | None = None) -> None:
        """Posts a send or receive, whose tensor is kept until it is waited for.

        ``group`` holds the tiles of a halo, which may go through their shared memory.
        """
        message = tensor
        if event.codec:
            codec = usual_codec(event.codec)
            message = tensor.new_empty(event.num_bytes, dtype=torch.uint8)
            if event.kind == "send":
                encode(codec, tensor, message)
                tensor = message
        handle = self._begin(event, message, group)
        key = event.kind, event.peer, event.tag
        self._open.setdefault(key, deque()).append((handle, event, tensor, message))

    def _begin(self, event: Event, message: Tensor, group: Group | None) -> Handle:
        place = event.peer, event.tag, group or self.world.all_ranks, event.channel
        handle = post(event.kind, message, *place, channels=self.channels, backend=event.route)
        following = self.events[self.at : self.at + 1]
        call = event.call, event.backend
        if not event.call or not following or (following[0].call, following[0].backend) != call:
            end_call(self.channels, self.world)
        return handle

    def wait(self, event: Event) -> tuple[Event, Tensor]:
        """Waits for the oldest message that an event means; returns its post and its tensor."""
        key = WAITS[event.kind], event.peer, event.tag
        handle, post, tensor, message = self._open[key].popleft()
        handle.wait()
        if post.codec and post.kind == "recv":
            decode(usual_codec(post.codec), message, tensor)
        return post, tensor

    def wait_sends(self) -> None:
        """Waits for all sends that are under way."""
        for (kind, _, _), messages in self._open.items():
            while kind == "send" and messages:
                messages.popleft()[0].wait()

    def waits(self, number: int, back: bool) -> list[tuple[Rect, Tensor]]:
        """Waits for the messages of an exchange; returns the pixels that came with each.

        ``number`` is its position in the stage's ``comm``; ``back``: the gradients come.
        """
        arrived: list[tuple[Rect, Tensor]] = []
        while True:
            event = self._next()
            part = event.part
            ours = part.number == number and part.back == back and part.node
            if not ours or event.kind not in WAITS:
                return arrived
            self._take(event)
            post, tensor = self.wait(event)
            if post.kind == "recv":
                assert post.rect is not None
                arrived.append((post.rect, tensor))

    def gather(self, tensor: Tensor, node: str, back: bool = False) -> Tensor:
        """Returns a tensor of all ranks of the stage, stacked, where a pass comes to a node."""
        event = self._collective(node, back)
        return all_gather_stacked(tensor, self.groups[event.peer], backend=event.route)

    def add_up(self, tensor: Tensor, node: str) -> None:
        """Sums a tensor over the ranks of the stage, in place, where a pass comes to a node."""
        event = self._collective(node, False)
        all_reduce(tensor, group=self.groups[event.peer], backend=event.route)

    def start_ready_sums(self) -> None:
        """Begins the sums that come next, as far as their gradients are complete."""
        # Autograd may finish gradients in another order than the plan sums them. All ranks must
        # begin sums in one order, so an early gradient waits for its turn:
        #
        #   plan    issue conv3   issue conv2        ready: conv2          -> nothing begins
        #           ^ here                           ready: conv2, conv3   -> both begin
        #
        # Where the order is free, conv2 begins at once; its event is passed by later.
        while (event := self._ready_sum()) is not None:
            while self.events[self.at].kind == "wait_issued":  # of those that must end before
                self.at += 1
                self.sums.finish(self.events[self.at - 1])
            self.sums.start(event)
            while (begun := self.events[self.at]).kind == "issue" and self.sums.has_begun(begun):
                self.at += 1

    def _ready_sum(self) -> Event | None:
        at = self.at
        while self.events[at].kind == "wait_issued":
            at += 1
        while (event := self.events[at]).kind == "issue":
            if (event.peer, event.tag) in self.sums.ready and not self.sums.has_begun(event):
                return event
            if not self.is_free:
                return None
            at += 1
        return None

    def _collective(self, node: str, back: bool) -> Event:
        event = self._next()
        if event.kind != "collective" or event.part.node != node or event.part.back != back:
            way = "the way back of " if back else ""
            raise RunError(f"the pass has come to {way}{node}, where the plan has {event.what}")
        self._take(event)
        return event

    def _next(self) -> Event:  # of a pass but for gradient sums, without going on
        at = self.at
        while (event := self.events[at]).kind in SUMS:
            at += 1
        return event

    def _take(self, event: Event) -> None:
        # The sums before it begin. Most of them have begun when autograd made their gradients.
        # But a tile without pixels makes none, so no hook has run for it; the pass has left the
        # nodes before this event, so what there is of their gradients is complete.
        while (before := self.events[self.at]) is not event:
            self.at += 1
            self.sums.carry_on(before)
        self.at += 1
