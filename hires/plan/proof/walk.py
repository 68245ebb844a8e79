"""Walks all ranks through their programs: what every semantics of messages shares.

Ranks, collectives and waits are here; ``hires.plan.proof.machine`` decides when a posted message
begins and ends.

The collectives of a group meet in the order in which each member comes to them. A member that has
issued a sum goes on, so it may be several meetings ahead of the others:

    rank 0   issue a   issue b   wait a ...      meeting 0: both have come, complete
    rank 1   issue a   (computes)                meeting 1: rank 1 is absent
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hires.plan.event import ALONE, MEETINGS, POSTS, Event

Channel = tuple[int, int, int]
"""(source, target, tag)."""
Meeting = tuple[int, int]
"""(group, number): the collectives of a group, counted as each member comes to them."""
WORLD = -1
"""The group of all ranks."""


@dataclass
class Proof:
    """What the abstract machine found."""

    num_messages: int = 0
    num_collectives: int = 0
    problems: list[str] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    """Ranks that never reach their end."""


class Waiter(NamedTuple):
    """Something that cannot go on."""

    rank: int
    peer: int | None = None
    """None: the rank itself; else its stream for the messages with this rank."""
    lane: int = 0
    """Which of its streams for this rank, where there are several."""


class Coming:
    """The events that stuck ranks have not come to, the one at which they stand included."""

    def __init__(self, walk: Walk) -> None:
        self._events: dict[tuple[str, int, int], list[Event]] = {}
        for rank in walk.proof.stuck:
            for event in walk.programs[rank][walk.at[rank] :]:
                self._events.setdefault((event.kind, rank, event.peer), []).append(event)

    def events(self, kind: str, rank: int, peer: int) -> list[Event]:
        """Returns those of a kind, in order; for a collective ``peer`` is the group."""
        return self._events.get((kind, rank, peer), [])

    def has(self, kind: str, rank: int, peer: int, tag: int) -> bool:
        """Whether a rank would come to such an event, if it went on."""
        return any(event.tag == tag for event in self.events(kind, rank, peer))

    def meets(self, rank: int, group: int) -> bool:
        """Whether a rank would come to a collective of a group, or begin a sum."""
        return any(self.events(kind, rank, group) for kind in (*MEETINGS, "issue"))


class Walk(ABC):
    """All ranks' positions, and what each of them waits for."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        self.programs = programs
        self.members = dict(enumerate(dict.fromkeys(ranks) for ranks in members))
        self.members[WORLD] = dict.fromkeys(range(len(programs)))
        self.at = [0] * len(programs)
        self.ready: deque[int] = deque()
        self.arrived: dict[Channel, deque[Event]] = {}  # received, not waited for yet
        self.num_open = 0  # posts that have not met their other side
        self.open_sends: list[dict[Channel, deque[Event]]] = [{} for _ in programs]
        self.meeting: dict[Meeting, dict[int, Event]] = {}
        self.calls: dict[tuple[int, int], int] = {}  # by (rank, group): meetings it has come to
        self.issued: dict[tuple[int, int, int], deque[Meeting]] = {}  # by (rank, group, tag)
        self.proof = Proof()

    def run(self) -> None:
        """Advances every rank as far as it gets, waking those that wait for what happened."""
        self.ready.extend(range(len(self.programs)))
        while self.ready:
            rank = self.ready.popleft()
            while (event := self.next_of(rank)) is not None and self._step(rank, event):
                pass
        self.proof.stuck = [r for r in range(len(self.programs)) if self.next_of(r) is not None]

    def next_of(self, rank: int) -> Event | None:
        """Returns what a rank does next, or None at its end."""
        program, at = self.programs[rank], self.at[rank]
        return program[at] if at < len(program) else None

    @abstractmethod
    def post(self, rank: int, event: Event) -> int:
        """Posts a send or receive; returns how many events of the rank that takes.

        0 where the rank cannot go on yet.
        """

    @abstractmethod
    def way(self, event: Event) -> Hashable:
        """Returns what messages between two ranks share that keep their order."""

    @abstractmethod
    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns what cannot go on itself and holds up a message that a waiter waits for."""

    def sentence(self, waiter: Waiter) -> str:
        """Describes what a stream waits for."""
        raise AssertionError(f"{waiter} is a stream, but these semantics have none")

    def take(self, rank: int, event: Event) -> bool:
        """Takes the message that a rank waits for; returns whether it was there."""
        arrived = self.arrived.get((event.peer, rank, event.tag))
        if not arrived:
            return False
        arrived.popleft()
        return True

    def unused(self) -> Iterator[tuple[int, int, Event]]:
        """Yields (source, target, receive) of messages that have come and lie there."""
        for (source, target, _), receives in self.arrived.items():
            if receives:
                yield source, target, receives[0]

    def match(self, source: int, target: int, send: Event, receive: Event) -> None:
        """Notes that a message is on its way, and compares what both sides say of it."""
        self.proof.num_messages += 1
        self.num_open -= 2
        if send[2:6] != receive[2:6]:
            self.proof.problems.append(
                f"rank {source} sends {spoken(send)} as {list(send.shape)} {send.dtype} where "
                f"rank {target} expects {spoken(receive)} as {list(receive.shape)} "
                f"{receive.dtype}"
            )

    def deliver(self, source: int, target: int, receive: Event) -> None:
        """Ends a receive; its rank may wait for it."""
        self.arrived.setdefault((source, target, receive.tag), deque()).append(receive)
        self.ready.append(target)

    def open_send(self, channel: Channel, send: Event) -> None:
        """Keeps a send that is not done."""
        self.open_sends[channel[0]].setdefault(channel, deque()).append(send)

    def end_send(self, channel: Channel) -> None:
        """Ends the oldest send of a channel; its rank may wait for it."""
        sends = self.open_sends[channel[0]]
        sends[channel].popleft()
        if not sends[channel]:
            del sends[channel]
        self.ready.append(channel[0])

    def unmet(self, rank: int, event: Event) -> list[Channel]:
        """Returns the channels of the sends that an event waits for."""
        if event.kind == "wait_sends":
            return list(self.open_sends[rank])
        channel = (rank, event.peer, event.tag)
        return [channel] if channel in self.open_sends[rank] else []

    def absent(self, rank: int, event: Event) -> list[int]:
        """Returns the members of a group that have not come to what holds a rank up.

        That is a collective, or the oldest sum that it issued; none if it has issued no such sum.
        """
        meeting = event.peer, self.calls.get((rank, event.peer), 0)
        if event.kind == "wait_issued":
            begun = self.issued.get((rank, event.peer, event.tag))
            if not begun:
                return []
            meeting = begun[0]
        present = self.meeting.get(meeting, {})
        return [member for member in self.members[event.peer] if member not in present]

    def _step(self, rank: int, event: Event) -> bool:
        """Executes one event; returns whether the rank may go on."""
        kind, steps = event.kind, 1
        if kind in MEETINGS or kind == "issue":
            return self._meet(rank, event)
        if kind in POSTS:
            steps = self.post(rank, event)
            self.num_open += steps
        elif kind == "wait_recv":
            steps = self.take(rank, event)
        elif kind == "wait_issued":
            begun = self.issued.get((rank, event.peer, event.tag))
            steps = begun is not None and len(begun) > 0 and begun[0] not in self.meeting
            if begun and steps:
                begun.popleft()
        elif kind not in ALONE:
            steps = not self.unmet(rank, event)
        self.at[rank] += steps
        return bool(steps)

    def _meet(self, rank: int, event: Event) -> bool:
        """Brings a rank to a collective, which happens when all members have come.

        Returns whether the rank may go on: one that has only issued a sum need not wait.
        """
        members = self.members.get(event.peer, {})
        if rank not in members:
            text = f"rank {rank} is no member of the group {list(members)} of {spoken(event)}"
            self.proof.problems.append(text)
            self.at[rank] += 1
            return True
        number = self.calls.get((rank, event.peer), 0)
        meeting = event.peer, number
        present = self.meeting.setdefault(meeting, {})
        present[rank] = event
        if event.kind == "issue":
            self.calls[rank, event.peer] = number + 1
            self.issued.setdefault((rank, event.peer, event.tag), deque()).append(meeting)
            self.at[rank] += 1
        if len(present) < len(members):
            return event.kind == "issue"
        del self.meeting[meeting]
        first_rank, first = next(iter(present.items()))
        for member, own in present.items():
            if own != first:
                self.proof.problems.append(
                    f"rank {first_rank} calls {spoken(first)} {list(first.shape)} where rank "
                    f"{member} of the same group calls {spoken(own)} {list(own.shape)}"
                )
            if own.kind != "issue":
                self.calls[member, event.peer] = number + 1
                self.at[member] += 1
        self.proof.num_collectives += event.kind in ("collective", "issue")
        self.ready.extend(member for member in present if member != rank)
        return True


def spoken(event: Event) -> str:
    """Returns an event in words."""
    return event.what or f"message {event.tag}"
