"""Can this plan run? Everything that would go wrong, found before anything starts.

The proof runs every rank's list of communications on an abstract machine with the least possible
buffering: a send ends when its receive is posted, a collective when all its members have come.
No receive is a wildcard, so the machine has one outcome, and one pass over the lists decides.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hires.plan.plan import Finding, Plan
from hires.plan.program import Event, events, groups

Channel = tuple[int, int, int]
"""(source, target, tag)."""


@dataclass
class Proof:
    """What the abstract machine found."""

    num_messages: int = 0
    num_collectives: int = 0
    problems: list[str] = field(default_factory=list)


def prove(plan: Plan) -> Proof:
    """Runs one step of one replica on the abstract machine.

    Replicas do the same and meet in the gradient groups only, at the end of the step, so the first
    one stands for all; their groups are cut down to its ranks.
    """
    ranks = range(plan.ranks_per_replica)
    members = [[r for r in group if r in ranks] for group in groups(plan)]
    return run_machine([list(events(plan, rank)) for rank in ranks], members)


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
        self.posted_sends: dict[Channel, deque[Event]] = {}
        self.posted_receives: dict[Channel, deque[Event]] = {}
        self.arrived: dict[Channel, int] = {}  # matched messages that nobody waited for yet
        self.open_sends = [0] * len(programs)
        self.open_channels: list[dict[Channel, int]] = [{} for _ in programs]
        self.collective: dict[int, dict[int, Event]] = {}
        self.proof = Proof()

    def run(self) -> None:
        """Advances every rank as far as it gets, waking those that wait for what happened."""
        ready = deque(range(len(self.programs)))
        while ready:
            rank = ready.popleft()
            while self.at[rank] < len(self.programs[rank]):
                woken = self._step(rank, self.programs[rank][self.at[rank]])
                if woken is None:
                    break
                ready.extend(woken)
        self._report_stuck()
        self._report_unmatched()

    def _step(self, rank: int, event: Event) -> Iterable[int] | None:
        """Executes one event; returns the ranks that may go on now, or None if ``rank`` must wait."""
        if event.kind == "send":
            self.at[rank] += 1
            return self._post(self.posted_sends, self.posted_receives, rank, event)
        if event.kind == "recv":
            self.at[rank] += 1
            return self._post(self.posted_receives, self.posted_sends, rank, event)
        if event.kind == "collective":
            return self._meet(rank, event)
        if event.kind == "wait_recv":
            channel = (event.peer, rank, event.tag)
            if not self.arrived.get(channel):
                return None
            self.arrived[channel] -= 1
        elif self.open_sends[rank]:
            return None
        self.at[rank] += 1
        return ()

    def _post(
        self,
        here: dict[Channel, deque[Event]],
        there: dict[Channel, deque[Event]],
        rank: int,
        event: Event,
    ) -> Iterable[int]:
        """Posts a send or receive, and matches it if the other side is posted."""
        sending = event.kind == "send"
        channel = (rank, event.peer, event.tag) if sending else (event.peer, rank, event.tag)
        if sending:
            self._count_send(channel, 1)
        waiting = there.get(channel)
        if not waiting:
            here.setdefault(channel, deque()).append(event)
            return ()
        other = waiting.popleft()
        send, receive = (event, other) if sending else (other, event)
        if (send.shape, send.dtype) != (receive.shape, receive.dtype):
            self.proof.problems.append(
                f"rank {channel[0]} sends {_spoken(send)} as {list(send.shape)} {send.dtype}, but "
                f"rank {channel[1]} expects {list(receive.shape)} {receive.dtype}"
            )
        self.proof.num_messages += 1
        self.arrived[channel] = self.arrived.get(channel, 0) + 1
        self._count_send(channel, -1)
        return channel[:2]

    def _count_send(self, channel: Channel, change: int) -> None:
        """Keeps count of the sends of a rank that no receive has met."""
        rank = channel[0]
        self.open_sends[rank] += change
        opened = self.open_channels[rank]
        opened[channel] = opened.get(channel, 0) + change

    def _meet(self, rank: int, event: Event) -> Iterable[int] | None:
        """Lets a collective happen when all members have come to it."""
        present = self.collective.setdefault(event.peer, {})
        present[rank] = event
        members = self.members[event.peer]
        if rank not in members:
            self.proof.problems.append(f"rank {rank} is no member of the group of {_spoken(event)}")
        if len(present) < len(members):
            return None
        del self.collective[event.peer]
        self._compare(present)
        self.proof.num_collectives += 1
        for member in present:
            self.at[member] += 1
        return list(present)

    def _compare(self, present: dict[int, Event]) -> None:
        """Reports members of a group that came for different collectives."""
        first_rank, first = next(iter(present.items()))
        for rank, event in present.items():
            if event != first:
                self.proof.problems.append(
                    f"rank {first_rank} calls {_spoken(first)} {list(first.shape)} where rank "
                    f"{rank} of the same group calls {_spoken(event)} {list(event.shape)}"
                )

    def _report_stuck(self) -> None:
        """Describes a cycle of ranks that wait for each other, or a rank that waits for nobody."""
        stuck = [r for r, at in enumerate(self.at) if at < len(self.programs[r])]
        if not stuck:
            return
        path = [stuck[0]]
        while True:
            rank = path[-1]
            others = self._waits_for(rank, self.programs[rank][self.at[rank]])
            blocked = [r for r in others if r in stuck]
            if not blocked or blocked[0] in path:
                if blocked:
                    path = path[path.index(blocked[0]) :]
                break
            path.append(blocked[0])
        said = [self._sentence(rank) for rank in path]
        self.proof.problems.append("deadlock: " + "; ".join(said))

    def _waits_for(self, rank: int, event: Event) -> list[int]:
        """Returns the ranks without which a rank cannot go on."""
        if event.kind == "collective":
            present = self.collective.get(event.peer, {})
            return [r for r in self.members[event.peer] if r not in present]
        if event.kind == "wait_sends":
            return [channel[1] for channel, count in self.open_channels[rank].items() if count]
        return [event.peer]

    def _sentence(self, rank: int) -> str:
        """Says what a rank waits for."""
        event = self.programs[rank][self.at[rank]]
        others = ", ".join(str(r) for r in self._waits_for(rank, event))
        return f"rank {rank} waits for {_spoken(event)} with rank {others}"

    def _report_unmatched(self) -> None:
        """Reports messages whose other side is missing, if nothing worse is known."""
        for posted, text in (
            (self.posted_sends, "rank {0} sends {2} to rank {1}, which never receives it"),
            (self.posted_receives, "rank {1} waits for {2} from rank {0}, which never sends it"),
        ):
            for (source, target, _), waiting in posted.items():
                for event in itertools.islice(waiting, 1):
                    self.proof.problems.append(text.format(source, target, _spoken(event)))


def verify(plan: Plan) -> list[Finding]:
    """Returns the findings of the proof and sets the plan's verdict."""
    proof = prove(plan)
    if proof.problems:
        plan.verdict = f"{len(proof.problems)} problems"
        return [Finding("error", "parallel", text) for text in proof.problems[:8]]
    total = proof.num_messages * plan.num_replicas
    plan.verdict = (
        f"deadlock-free, {total} messages and {proof.num_collectives} collectives a step"
    )
    return []


def _spoken(event: Event) -> str:
    """Returns an event in words."""
    return event.what or f"message {event.tag}"
