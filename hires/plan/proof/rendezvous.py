"""Semantics without buffers: a send ends when its receive is posted."""

from __future__ import annotations

from collections import deque

from hires.plan.event import Event
from hires.plan.proof.stuck import Coming, Waiter
from hires.plan.proof.walk import Channel, Walk, not_received, not_sent


class Rendezvous(Walk):
    """Messages with one tag between two ranks meet in order; others pass each other."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.sends: dict[Channel, deque[Event]] = {}  # posted, without a receive
        self.receives: dict[Channel, deque[Event]] = {}  # posted, without a send

    def post(self, rank: int, event: Event) -> int:
        """Posts a send or receive, and matches it if the other side is posted."""
        sending = event.kind == "send"
        channel = (rank, event.peer, event.tag) if sending else (event.peer, rank, event.tag)
        here, there = (self.sends, self.receives) if sending else (self.receives, self.sends)
        if sending:
            self.open_send(channel, event)
        if not there.get(channel):
            here.setdefault(channel, deque()).append(event)
            return 1
        other = there[channel].popleft()
        send, receive = (event, other) if sending else (other, event)
        source, target, _ = channel
        self.match(source, target, send, receive)
        self.deliver(source, target, receive)
        self.end_send(channel)
        return 1

    def expects(self, rank: int, event: Event) -> bool:
        """Whether a rank has posted a receive of the message that an event waits for."""
        return bool(self.receives.get((event.peer, rank, event.tag)))

    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns the stuck ranks that would come to what a rank waits for, if they went on."""
        rank = waiter.rank
        event = self.next_of(rank)
        assert event is not None
        if event.kind == "wait_recv":
            others = [event.peer] if coming.has("send", event.peer, rank, event.tag) else []
        else:
            others = [
                target
                for _, target, tag in self.unmet(rank, event)
                if coming.has("recv", target, rank, tag)
            ]
        return [Waiter(other) for other in others]

    def one_sided(self, coming: Coming) -> list[str]:
        """Returns the messages whose other side does not come at all."""
        found = []
        for (source, target, tag), left in self.sends.items():
            if left and not coming.has("recv", target, source, tag):
                found.append(not_received(source, target, left[0]))
        for (source, target, tag), left in self.receives.items():
            if left and not coming.has("send", source, target, tag):
                found.append(not_sent(source, target, left[0]))
        return found
