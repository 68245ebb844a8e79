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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hires.plan.event import ALONE, MEETINGS, Event

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


class Walk(ABC):
    """All ranks' positions, and what each of them waits for."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        self.programs = programs
        self.members = dict(enumerate(dict.fromkeys(ranks) for ranks in members))
        self.members[WORLD] = dict.fromkeys(range(len(programs)))
        self.at = [0] * len(programs)
        self.ready: deque[int] = deque()
        self.arrived: dict[Channel, deque[Event]] = {}  # received, not waited for yet
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

    def joined(self, rank: int, event: Event) -> Meeting | None:
        """Returns the open meeting that holds a rank up: a collective, or a sum that it issued."""
        if event.kind == "wait_issued":
            begun = self.issued.get((rank, event.peer, event.tag))
            return begun[0] if begun else None
        return event.peer, self.calls.get((rank, event.peer), 0)

    def absent(self, rank: int, event: Event) -> list[int]:
        """Returns the members of a group that have not come to the collective of a rank."""
        meeting = self.joined(rank, event)
        if meeting is None:
            return []
        present = self.meeting.get(meeting, {})
        return [member for member in self.members[event.peer] if member not in present]

    @abstractmethod
    def post(self, rank: int, event: Event) -> int:
        """Posts a send or receive; returns how many events of the rank that takes.

        0 where the rank cannot go on yet.
        """

    def take(self, rank: int, event: Event) -> bool:
        """Takes the message that a rank waits for; returns whether it was there."""
        arrived = self.arrived.get((event.peer, rank, event.tag))
        if arrived:
            arrived.popleft()
            return True
        return False

    def unused(self) -> Iterator[tuple[int, int, Event]]:
        """Yields (source, target, receive) of messages that have come and lie there."""
        for (source, target, _), receives in self.arrived.items():
            if receives:
                yield source, target, receives[0]

    @abstractmethod
    def expects(self, rank: int, event: Event) -> bool:
        """Whether a rank has posted a receive of the message that an event waits for."""

    @abstractmethod
    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns what cannot go on itself and holds up a message that a waiter waits for."""

    def sentence(self, waiter: Waiter) -> str:
        """Describes what a stream waits for."""
        raise AssertionError(f"{waiter} is a stream, but these semantics have none")

    @abstractmethod
    def one_sided(self, coming: Coming) -> list[str]:
        """Returns the messages whose other side does not come at all."""

    def _step(self, rank: int, event: Event) -> bool:
        """Executes one event; returns whether the rank may go on."""
        if event.kind in MEETINGS or event.kind == "issue":
            return self._meet(rank, event)
        if event.kind == "wait_issued" and not self._is_summed(rank, event):
            return False
        if event.kind in ALONE or event.kind == "wait_issued":
            self.at[rank] += 1
            return True
        steps = 1
        if event.kind in ("send", "recv"):
            steps = self.post(rank, event)
            if not steps:
                return False
        elif event.kind == "wait_recv":
            if not self.take(rank, event):
                return False
        elif self._waits_for_sends(rank, event):
            return False
        self.at[rank] += steps
        return True

    def match(self, source: int, target: int, send: Event, receive: Event) -> None:
        """Notes that a message is on its way, and compares what both sides say of it."""
        self.proof.num_messages += 1
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

    def _waits_for_sends(self, rank: int, event: Event) -> bool:
        """Whether there are such channels."""
        sends = self.open_sends[rank]
        return bool(sends) and (event.kind == "wait_sends" or bool(self.unmet(rank, event)))

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
        self._compare_members(present)
        self.proof.num_collectives += event.kind in ("collective", "issue")
        for member, own in present.items():
            if own.kind != "issue":
                self.calls[member, event.peer] = number + 1
                self.at[member] += 1
        self.ready.extend(member for member in present if member != rank)
        return True

    def _is_summed(self, rank: int, event: Event) -> bool:
        """Whether a sum that a rank waits for is complete; one that was never issued never is."""
        begun = self.issued.get((rank, event.peer, event.tag))
        if not begun or begun[0] in self.meeting:
            return False
        begun.popleft()
        return True

    def _compare_members(self, present: dict[int, Event]) -> None:
        """Reports members of a group that came for different collectives."""
        first_rank, first = next(iter(present.items()))
        for rank, event in present.items():
            if event != first:
                self.proof.problems.append(
                    f"rank {first_rank} calls {spoken(first)} {list(first.shape)} where rank "
                    f"{rank} of the same group calls {spoken(event)} {list(event.shape)}"
                )


def spoken(event: Event) -> str:
    """Returns an event in words."""
    return event.what or f"message {event.tag}"


def not_received(source: int, target: int, send: Event) -> str:
    """Says that a message has no receive."""
    return f"rank {source} sends {spoken(send)} to rank {target}, which never receives it"


def not_sent(source: int, target: int, receive: Event) -> str:
    """Says that a receive has no message."""
    return f"rank {target} expects {spoken(receive)} from rank {source}, which never sends it"


def extra(more: list[Event], fewer: list[Event]) -> Event:
    """Returns one that has no other side: the first that the other side does not name at all."""
    named = {event.what for event in fewer}
    return next((event for event in more if event.what not in named), more[len(fewer)])


class Waiter(NamedTuple):
    """Something that cannot go on."""

    rank: int
    peer: int | None = None
    """None: the rank itself; else its stream for the messages with this rank."""
    lane: int = 0
    """Which of its streams for this rank, where there are several."""


class Coming:
    """The events that stuck ranks have not come to, the one at which they stand included."""

    def __init__(
        self, programs: Sequence[list[Event]], at: Sequence[int], stuck: Sequence[int]
    ) -> None:
        """Takes all ranks' programs and positions, and the ranks that are not at their end."""
        self._tagged: set[tuple[str, int, int, int]] = set()
        self._posts: dict[tuple[str, int, int], list[Event]] = {}
        for rank in stuck:
            for event in programs[rank][at[rank] :]:
                self._tagged.add((event.kind, rank, event.peer, event.tag))
                self._posts.setdefault((event.kind, rank, event.peer), []).append(event)

    def has(self, kind: str, rank: int, peer: int, tag: int | None = None) -> bool:
        """Whether a rank would come to such an event; for a collective ``peer`` is the group."""
        if tag is None:
            return (kind, rank, peer) in self._posts
        return (kind, rank, peer, tag) in self._tagged

    def meets(self, rank: int, group: int) -> bool:
        """Whether a rank would come to a collective of a group, or begin a sum."""
        return any(self.has(kind, rank, group) for kind in (*MEETINGS, "issue"))

    def posts(self, kind: str, rank: int, peer: int) -> list[Event]:
        """Returns all such events, in order."""
        return self._posts.get((kind, rank, peer), [])
