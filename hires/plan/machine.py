"""Would these programs of messages come to their end? An abstract machine runs them.

It has the least possible buffering: a send ends when its receive is posted, a collective when all
its members have come. No receive is a wildcard, so the machine has one outcome, and one pass over
the programs decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hires.plan.program import Event

Channel = tuple[int, int, int]
"""(source, target, tag)."""


@dataclass
class Proof:
    """What the abstract machine found."""

    num_messages: int = 0
    num_collectives: int = 0
    problems: list[str] = field(default_factory=list)


def run_machine(programs: list[list[Event]], members: list[list[int]]) -> Proof:
    """Runs one list of events per rank; ``members`` are the ranks of each group.

    Returns:
        The proof; ``problems`` is empty if every rank reaches its end with every message received,
        else it names the mismatches, or the ranks that wait for each other.
    """
    machine = _Machine(programs, members)
    machine.run()
    return machine.proof


class _Machine:
    """All ranks' positions, and what has been posted."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        self.programs = programs
        self.members = members
        self.at = [0] * len(programs)
        self.sends: dict[Channel, deque[Event]] = {}  # posted, without a receive
        self.receives: dict[Channel, deque[Event]] = {}  # posted, without a send
        self.arrived: dict[Channel, deque[Event]] = {}  # matched, not waited for yet
        self.open_sends: list[dict[Channel, int]] = [{} for _ in programs]
        self.collective: dict[int, dict[int, Event]] = {}
        self.proof = Proof()

    def run(self) -> None:
        """Advances every rank as far as it gets, waking those that wait for what happened."""
        ready = deque(range(len(self.programs)))
        while ready:
            rank = ready.popleft()
            while (event := self._next(rank)) is not None:
                woken = self._step(rank, event)
                if woken is None:
                    break
                ready.extend(other for other in woken if other != rank)
        self._report()

    def _next(self, rank: int) -> Event | None:
        """Returns what a rank does next, or None at its end."""
        program, at = self.programs[rank], self.at[rank]
        return program[at] if at < len(program) else None

    def _step(self, rank: int, event: Event) -> Iterable[int] | None:
        """Executes one event; returns the ranks that may go on, or None if ``rank`` must wait."""
        if event.kind == "collective":
            return self._meet(rank, event)
        woken: Iterable[int] = ()
        if event.kind in ("send", "recv"):
            woken = self._post(rank, event)
        elif event.kind == "wait_recv":
            arrived = self.arrived.get((event.peer, rank, event.tag))
            if not arrived:
                return None
            arrived.popleft()
        elif self._unmet(rank, event):
            return None
        self.at[rank] += 1
        return woken

    def _post(self, rank: int, event: Event) -> Iterable[int]:
        """Posts a send or receive, and matches it if the other side is posted."""
        sending = event.kind == "send"
        channel = (rank, event.peer, event.tag) if sending else (event.peer, rank, event.tag)
        here, there = (self.sends, self.receives) if sending else (self.receives, self.sends)
        if sending:
            self._count_send(channel, 1)
        if not there.get(channel):
            here.setdefault(channel, deque()).append(event)
            return ()
        other = there[channel].popleft()
        send, receive = (event, other) if sending else (other, event)
        self._compare_sides(channel, send, receive)
        self.proof.num_messages += 1
        self.arrived.setdefault(channel, deque()).append(receive)
        self._count_send(channel, -1)
        return channel[:2]

    def _count_send(self, channel: Channel, change: int) -> None:
        """Keeps count of the sends of a rank that no receive has met."""
        counts = self.open_sends[channel[0]]
        counts[channel] = counts.get(channel, 0) + change
        if not counts[channel]:
            del counts[channel]

    def _compare_sides(self, channel: Channel, send: Event, receive: Event) -> None:
        """Reports a receive that expects something else than what is sent."""
        if send[2:] != receive[2:]:
            self.proof.problems.append(
                f"rank {channel[0]} sends {_spoken(send)} as {list(send.shape)} {send.dtype} where "
                f"rank {channel[1]} expects {_spoken(receive)} as {list(receive.shape)} "
                f"{receive.dtype}"
            )

    def _unmet(self, rank: int, event: Event) -> list[Channel]:
        """Returns the channels of the sends that an event waits for and no receive has met."""
        if event.kind == "wait_sends":
            return list(self.open_sends[rank])
        channel = (rank, event.peer, event.tag)
        return [channel] if channel in self.open_sends[rank] else []

    def _meet(self, rank: int, event: Event) -> Iterable[int] | None:
        """Lets a collective happen when all members have come to it."""
        members = self.members[event.peer]
        if rank not in members:
            text = f"rank {rank} is no member of the group {members} of {_spoken(event)}"
            self.proof.problems.append(text)
            self.at[rank] += 1
            return ()
        present = self.collective.setdefault(event.peer, {})
        present[rank] = event
        if len(present) < len(members):
            return None
        del self.collective[event.peer]
        self._compare_members(present)
        self.proof.num_collectives += 1
        for member in present:
            self.at[member] += 1
        return list(present)

    def _compare_members(self, present: dict[int, Event]) -> None:
        """Reports members of a group that came for different collectives."""
        first_rank, first = next(iter(present.items()))
        for rank, event in present.items():
            if event != first:
                self.proof.problems.append(
                    f"rank {first_rank} calls {_spoken(first)} {list(first.shape)} where rank "
                    f"{rank} of the same group calls {_spoken(event)} {list(event.shape)}"
                )

    def _report(self) -> None:
        """Says what keeps ranks from their end, and which messages have one side only."""
        stuck = [rank for rank in range(len(self.programs)) if self._next(rank) is not None]
        paths = [self._follow(rank) for rank in stuck]
        for path, is_cycle in paths:
            if is_cycle:
                self._say("deadlock", path)
                break
        self._report_one_sided()
        if paths and not self.proof.problems:
            self._say("no end", paths[0][0])

    def _say(self, what: str, path: list[int]) -> None:
        """Adds a problem: what each of some ranks waits for."""
        self.proof.problems.append(f"{what}: {'; '.join(self._sentence(rank) for rank in path)}")

    def _follow(self, rank: int) -> tuple[list[int], bool]:
        """Returns ranks that each wait for the next, and whether the last waits for the first."""
        path = [rank]
        while True:
            others = self._waits_for(path[-1])
            blocked = [other for other in others if self._would_help(other, path[-1])]
            if not blocked:
                return path, False
            if blocked[0] in path:
                return path[path.index(blocked[0]) :], True
            path.append(blocked[0])

    def _would_help(self, rank: int, waiting: int) -> bool:
        """Whether a stuck rank, if it went on, would come to what another one waits for."""
        event = self._next(waiting)
        assert event is not None
        if event.kind == "collective":
            return self._comes("collective", rank, event.peer)
        if event.kind == "wait_recv":
            return self._comes("send", rank, waiting, event.tag)
        tags = [channel[2] for channel in self._unmet(waiting, event) if channel[1] == rank]
        return any(self._comes("recv", rank, waiting, tag) for tag in tags)

    def _waits_for(self, rank: int) -> list[int]:
        """Returns the ranks without which a rank cannot go on."""
        event = self._next(rank)
        assert event is not None
        if event.kind == "collective":
            present = self.collective.get(event.peer, {})
            return [r for r in self.members[event.peer] if r not in present]
        if event.kind == "wait_recv":
            return [event.peer]
        return [channel[1] for channel in self._unmet(rank, event)]

    def _sentence(self, rank: int) -> str:
        """Says what a rank waits for."""
        event = self._next(rank)
        assert event is not None
        others = " and ".join(str(other) for other in self._waits_for(rank))
        if event.kind == "collective":
            return f"rank {rank} waits for rank {others} to join {_spoken(event)}"
        if event.kind == "wait_recv":
            return f"rank {rank} waits for {_spoken(event)} from rank {others}"
        unmet = [_spoken(self.sends[channel][0]) for channel in self._unmet(rank, event)]
        return f"rank {rank} waits for rank {others} to receive {' and '.join(unmet)}"

    def _report_one_sided(self) -> None:
        """Reports messages and collectives whose other side does not come at all."""
        for posted, kind, who, whom, text in (
            (self.sends, "recv", 1, 0, "rank {0} sends {2} to rank {1}, which never receives it"),
            (
                self.receives,
                "send",
                0,
                1,
                "rank {1} expects {2} from rank {0}, which never sends it",
            ),
            (self.arrived, "wait_recv", 1, 0, "rank {1} never waits for {2} from rank {0}"),
        ):
            for channel, events_left in posted.items():
                if events_left and not self._comes(kind, channel[who], channel[whom], channel[2]):
                    said = text.format(channel[0], channel[1], _spoken(events_left[0]))
                    self.proof.problems.append(said)
        for group, present in self.collective.items():
            absent = [r for r in self.members[group] if not self._comes("collective", r, group)]
            if absent:
                who, event = next(iter(present.items()))
                others = " and ".join(map(str, absent))
                said = (
                    f"rank {who} calls {_spoken(event)}, but rank {others} of its group never does"
                )
                self.proof.problems.append(said)

    def _comes(self, kind: str, rank: int, peer: int, tag: int | None = None) -> bool:
        """Whether a rank that is not at its end would still come to an event."""
        known = 0 <= rank < len(self.programs)
        rest = self.programs[rank][self.at[rank] :] if known else []
        return any((e.kind, e.peer) == (kind, peer) and tag in (None, e.tag) for e in rest)


def _spoken(event: Event) -> str:
    """Returns an event in words."""
    return event.what or f"message {event.tag}"
