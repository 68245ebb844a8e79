"""Semantics in which small halos go through the memory of one machine, where few may lie unread.

That is what ``hires.comm.shared`` does between the tiles of a stage. It is no rendezvous: a message
needs no receive to set out, but a send holds its rank up while ``SLOTS`` older ones lie unread, and
messages are read where they are waited for, in the order of sending, whatever their tag. All others
meet as they do over the network, so that each way can hold up the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import Event
from hires.plan.proof.rendezvous import Rendezvous
from hires.plan.proof.stuck import Coming, Waiter
from hires.plan.proof.walk import extra, not_received, not_sent, spoken


@dataclass
class Box:
    """The messages from one tile to another that nobody has read; the first meets the first."""

    written: deque[Event] = field(default_factory=deque)
    expected: deque[Event] = field(default_factory=deque)
    """Receives that were posted and not waited for."""

    @property
    def num_met(self) -> int:
        """Messages that are written and expected."""
        return min(len(self.written), len(self.expected))

    def place(self, tag: int) -> int | None:
        """Returns which message from now a receive will read; None if it was not posted."""
        return next((i for i, event in enumerate(self.expected) if event.tag == tag), None)


class Mailboxes(Rendezvous):
    """Each tile has a mailbox for each other one, direction of the pipeline by direction."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.boxes: dict[tuple[int, int, int], Box] = {}  # by (source, target, lane)
        self.halted: set[int] = set()

    def post(self, rank: int, event: Event) -> int:
        """Writes a message where there is room, or expects one."""
        if not event.mail:
            return super().post(rank, event)
        sending = event.kind == "send"
        source, target = (rank, event.peer) if sending else (event.peer, rank)
        box = self.boxes.setdefault((source, target, event.lane), Box())
        if sending and len(box.written) == SLOTS:
            return 0
        here = box.written if sending else box.expected
        here.append(event)
        if len(here) <= box.num_met:
            self.match(source, target, box.written[len(here) - 1], box.expected[len(here) - 1])
            self.ready.append(target)
        return 1

    def take(self, rank: int, event: Event) -> bool:
        """Reads the message that a rank waits for; one that is not the next stops the rank."""
        if not event.mail:
            return super().take(rank, event)
        box = self._box(rank, event)
        place = box.place(event.tag)
        if place is None or place >= len(box.written) or rank in self.halted:
            return False
        if place:
            self.halted.add(rank)
            self.proof.problems.append(
                f"rank {rank} waits for {spoken(event)} from rank {event.peer} before "
                f"{spoken(box.expected[0])}, which lies first in its mailbox"
            )
            return False
        box.written.popleft()
        box.expected.popleft()
        self.ready.append(event.peer)
        return True

    def unused(self) -> Iterator[tuple[int, int, Event]]:
        """Yields messages that were received and never read, too."""
        yield from super().unused()
        for (source, target, _), box in self.boxes.items():
            for index in range(box.num_met):
                yield source, target, box.expected[index]

    def expects(self, rank: int, event: Event) -> bool:
        """Whether a rank has posted a receive of the message that an event waits for."""
        if not event.mail:
            return super().expects(rank, event)
        return self._box(rank, event).place(event.tag) is not None

    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns the rank that would write or read what a rank waits for, if it went on."""
        event = self.next_of(waiter.rank)
        assert event is not None
        if not event.mail or event.kind == "wait_send":
            return super().blockers(waiter, coming)
        if waiter.rank in self.halted:
            return []
        kind = "wait_recv" if event.kind == "send" else "send"
        comes = _coming(coming, kind, event.peer, waiter.rank, event.lane)
        return [Waiter(event.peer)] if comes else []

    def one_sided(self, coming: Coming) -> list[str]:
        """Returns the messages that one side posts more often than the other."""
        found = super().one_sided(coming)
        for (source, target, lane), box in self.boxes.items():
            if not (box.written or box.expected):
                continue
            sends = [*box.written, *_coming(coming, "send", source, target, lane)]
            receives = [*box.expected, *_coming(coming, "recv", target, source, lane)]
            if len(sends) > len(receives):
                found.append(not_received(source, target, extra(sends, receives)))
            if len(receives) > len(sends):
                found.append(not_sent(source, target, extra(receives, sends)))
        return found

    def _box(self, rank: int, event: Event) -> Box:
        """Returns the mailbox in which a rank waits for a message."""
        return self.boxes.setdefault((event.peer, rank, event.lane), Box())


def _coming(coming: Coming, kind: str, rank: int, peer: int, lane: int) -> list[Event]:
    """Returns what a stuck rank would still do with a mailbox."""
    events = coming.posts(kind, rank, peer)
    return [event for event in events if event.mail and event.lane == lane]
