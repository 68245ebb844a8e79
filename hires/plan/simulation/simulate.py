"""Simulates how long a step of a plan takes: a discrete-event simulation of one replica.

Every rank goes through the events of ``hires.plan.program``, with its computation between them. A
message sets out when both sides have posted it (rendezvous) and its link is free, and a rank that
waits for it goes on when it has arrived.

Links serve their messages in a fixed order, that in which they would set out if all of them took no
time. So every time in a step is a sum or a maximum of earlier ones, and nothing that gets faster
makes anything slower; a link that chose whom to serve next would not have this property.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hires.core.ranks.timeline import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    HALO,
    Span,
    StepSpans,
)
from hires.plan.event import BYTES, POSTS, Event
from hires.plan.groups import groups, num_tile_groups
from hires.plan.plan import Plan
from hires.plan.simulation.costs import Costs, Item, timed_program


@dataclass(frozen=True)
class Link:
    """What lies between two ranks."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def travel_s(self, num_bytes: float) -> float:
        """Returns for how long a message keeps the link busy; it arrives a latency later."""
        return num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Network:
    """The links of a machine whose ranks fill one node after the other.

    Ranks of one node have a link of their own in each direction between any two of them. All ranks
    of a node share one way out of it and one way in.
    """

    near: Link = Link()
    """Between ranks of one node."""
    far: Link = Link()
    """Between nodes."""
    ranks_per_node: int = 2**31
    small_latency_s: float | None = None
    """Of a message of a small collective within a node; unset: that of the link."""

    def node_of(self, rank: int) -> int:
        """Returns the node that a rank is on."""
        return rank // self.ranks_per_node

    def link(self, ranks: list[int]) -> Link:
        """Returns the slowest link among some ranks."""
        return self.near if len({self.node_of(rank) for rank in ranks}) == 1 else self.far

    def lanes(self, source: int, target: int) -> list[tuple[str, int, int]]:
        """Returns what a message occupies, one message at a time each."""
        here, there = self.node_of(source), self.node_of(target)
        if here == there:
            return [("near", source, target)]
        return [("out", here, 0), ("in", there, 0)]

    def gather_s(self, ranks: list[int], num_bytes: float) -> float:
        """Returns how long an all-gather takes from its last member's arrival.

        Args:
            ranks: its members.
            num_bytes: what each hands in; each receives that of all others.
        """
        link = self.link(ranks)
        latency_s = link.latency_s
        if link is self.near and self.small_latency_s is not None:
            latency_s = self.small_latency_s
        rounds = (len(ranks) - 1).bit_length()
        return rounds * latency_s + (len(ranks) - 1) * link.travel_s(num_bytes)

    def reduce_s(self, ranks: list[int], num_bytes: float) -> float:
        """Returns how long an all-reduce takes from its last member's arrival.

        It sends the least that any algorithm can, 2 (n - 1) / n of the bytes, in a number of rounds
        that is twice the logarithm.
        """
        link = self.link(ranks)
        share = 2 * (len(ranks) - 1) / len(ranks)
        rounds = (len(ranks) - 1).bit_length()
        return 2 * rounds * link.latency_s + share * link.travel_s(num_bytes)


Channel = tuple[int, int, int]
"""(source, target, tag)."""
Key = tuple[Channel, int]
"""One message: its channel, and how many messages of the channel are before it."""
Lane = tuple[str, int, int]
"""What a message occupies, one message at a time: see :meth:`Network.lanes`."""


@dataclass
class Simulation:
    """The predicted time line of one step of one replica."""

    step_s: float
    ranks: list[StepSpans]
    """What every rank of the replica does, as a run would have recorded it."""
    busy_s: list[dict[str, float]]
    """Seconds of computation of every rank, by kind."""
    waiting_s: list[dict[str, float]]
    """Seconds in which every rank waits, by kind."""

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        busy = sum(sum(kinds.values()) for kinds in self.busy_s)
        return 1 - busy / (len(self.ranks) * self.step_s) if self.step_s else 0.0


def simulate(plan: Plan, costs: Costs, network: Network | None = None) -> Simulation:
    """Returns what one step of a plan would take.

    Args:
        plan: any that the proof finds free of deadlock.
        costs: seconds of computation.
        network: what messages take; unset: nothing.

    Raises:
        AssertionError: the plan does not come to its end, which its proof excludes.
    """
    programs = [timed_program(plan, rank, costs) for rank in range(plan.ranks_per_replica)]
    free = _Machine(plan, programs, Network(), None)
    free.run()
    if network is None or network == Network():
        return free.result()
    machine = _Machine(plan, programs, network, free.order())
    machine.run()
    return machine.result()


@dataclass
class _Transfer:
    """A message on its way."""

    posted_s: dict[str, float] = field(default_factory=dict)
    """When the ``send`` and the ``recv`` were posted, as far as they are."""
    num_bytes: int = 0
    begin_s: float = math.nan
    end_s: float = math.nan


@dataclass
class _Rank:
    """The state of a rank."""

    items: list[Item]
    at: int = 0
    now_s: float = 0.0
    counts: dict[tuple[str, Channel], int] = field(default_factory=lambda: defaultdict(int))
    """Events of a kind on a channel so far."""
    sends: list[Key] = field(default_factory=list)
    """Everything it has sent."""
    spans: list[Span] = field(default_factory=list)
    passes: dict[str, list[float]] = field(default_factory=dict)
    """When an action began and ended."""
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waiting_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def compute(self, item: Item) -> None:
        """Spends the seconds of a piece of computation."""
        begin_s = self.now_s
        self.now_s += item.seconds
        self.busy_s[item.kind] += item.seconds
        if item.action:
            self.passes.setdefault(item.action, [begin_s, begin_s])[1] = self.now_s
        elif item.seconds:
            self.spans.append(Span(item.kind, "", begin_s, self.now_s))

    def wait(self, item: Item, until_s: float) -> None:
        """Goes on at a time, which may be past."""
        begin_s, self.now_s = self.now_s, max(self.now_s, until_s)
        if item.kind in (HALO, COLLECTIVE):
            self.passes.setdefault(item.action, [begin_s, begin_s])[1] = self.now_s
        if self.now_s > begin_s:
            assert item.event is not None
            self.waiting_s[item.kind] += self.now_s - begin_s
            span = Span(item.kind, item.action, begin_s, self.now_s, item.event.what)
            self.spans.append(span)


class _Machine:
    """All ranks with their clocks, and the links between them.

    No receive is a wildcard, so the order in which ranks are advanced changes nothing.
    """

    def __init__(
        self,
        plan: Plan,
        programs: list[list[Item]],
        network: Network,
        order: list[Key] | None,
    ) -> None:
        self.plan = plan
        self.network = network
        self.ranks = [_Rank(items) for items in programs]
        self.members = groups(plan)
        self.transfers: dict[Key, _Transfer] = defaultdict(_Transfer)
        self.matched: list[Key] = []
        self.lanes: dict[Lane, deque[Key]] = defaultdict(deque)  # messages in their fixed order
        self.free_s: dict[Lane, float] = defaultdict(float)
        self.in_order = order is not None
        for key in order or ():
            for lane in network.lanes(*key[0][:2]):
                self.lanes[lane].append(key)
        self.present: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self.summed_s: dict[tuple[int, int], float] = {}

    def run(self) -> None:
        """Advances every rank to its end."""
        ready = deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            state = self.ranks[rank]
            while state.at < len(state.items):
                woken = self._step(rank, state, state.items[state.at])
                if woken is None:
                    break
                ready.extend(other for other in woken if other != rank)
        stuck = [rank for rank, state in enumerate(self.ranks) if state.at < len(state.items)]
        assert not stuck, f"ranks {stuck} do not come to their end"

    def order(self) -> list[Key]:
        """Returns all messages in the order in which they set out."""
        return sorted(self.matched, key=lambda key: self.transfers[key].begin_s)

    def result(self) -> Simulation:
        """Returns what happened."""
        ranks = []
        for rank, state in enumerate(self.ranks):
            passes = [
                Span(FORWARD if action[0] == "F" else BACKWARD, action, begin_s, end_s)
                for action, (begin_s, end_s) in state.passes.items()
            ]
            spans = sorted([*state.spans, *passes], key=lambda span: (span.begin_s, -span.end_s))
            ranks.append(StepSpans(rank, 0, "", 0.0, spans))
        return Simulation(
            max((state.now_s for state in self.ranks), default=0.0),
            ranks,
            [dict(state.busy_s) for state in self.ranks],
            [dict(state.waiting_s) for state in self.ranks],
        )

    def _step(self, rank: int, state: _Rank, item: Item) -> Iterable[int] | None:
        """Advances a rank by an item; returns the ranks that may go on, or None if it waits."""
        event = item.event
        woken: Iterable[int] = ()
        if event is None:
            state.compute(item)
            state.at += 1
            return woken
        if event.kind in ("collective", "issue"):
            return self._meet(rank, item, event)
        outgoing = event.kind in ("send", "wait_send")
        channel = (rank, event.peer, event.tag) if outgoing else (event.peer, rank, event.tag)
        count = state.counts[event.kind, channel]
        if event.kind in POSTS:
            woken = self._post(state, event, (channel, count))
        elif event.kind == "wait_issued":
            until_s = self.summed_s.get((event.peer, event.tag))
            if until_s is None:
                return None
            state.wait(item, until_s)
        else:
            every = event.kind == "wait_sends"
            keys = [key for key in state.sends if every or key[0] == channel]
            if event.kind == "wait_recv":
                keys = [(channel, count)]
            ends = [self.transfers[key].end_s for key in keys]
            if any(map(math.isnan, ends)):
                return None
            state.wait(item, max(ends, default=0.0))
        state.counts[event.kind, channel] += 1
        state.at += 1
        return woken

    def _post(self, state: _Rank, event: Event, key: Key) -> list[int]:
        """Posts one side of a message; returns the ranks that it may let go on.

        The message sets out if both sides are posted and it is its turn, and those behind it.
        """
        self.transfers[key].posted_s[event.kind] = state.now_s
        if event.kind == "send":
            self.transfers[key].num_bytes = math.prod(event.shape) * BYTES[event.dtype]
            state.sends.append(key)
        if len(self.transfers[key].posted_s) < len(POSTS):
            return []
        self.matched.append(key)
        woken: list[int] = []
        todo = [key]
        while todo:
            key = todo.pop()
            transfer, ends = self.transfers[key], key[0][:2]
            lanes, link = self.network.lanes(*ends), self.network.link([*ends])
            if len(transfer.posted_s) < len(POSTS) or not math.isnan(transfer.begin_s):
                continue  # one side is missing, or it came here by its other lane before
            if self.in_order and any(self.lanes[lane][0] != key for lane in lanes):
                continue
            free_s = max(self.free_s[lane] for lane in lanes) if self.in_order else 0.0
            transfer.begin_s = max(*transfer.posted_s.values(), free_s)
            passed_s = transfer.begin_s + link.travel_s(transfer.num_bytes)
            transfer.end_s = passed_s + link.latency_s
            woken += ends
            for lane in lanes:
                self.free_s[lane] = passed_s
                if self.in_order:
                    self.lanes[lane].popleft()
                    todo += [self.lanes[lane][0]] if self.lanes[lane] else []
        return woken

    def _meet(self, rank: int, item: Item, event: Event) -> Iterable[int] | None:
        """Brings a rank to a collective, which ends when all members of the replica have come.

        A rank that has only issued a sum goes on; sums of a group run one after the other.
        """
        state, members = self.ranks[rank], self.members[event.peer]
        key, issued = (event.peer, event.tag), event.kind == "issue"
        here = [member for member in members if member < len(self.ranks)]
        present = self.present[key]
        present.setdefault(rank, state.now_s)
        if issued:
            state.at += 1
        if len(present) < len(here):
            return () if issued else None
        num_bytes = math.prod(event.shape) * BYTES[event.dtype]
        gathers = event.peer < num_tile_groups(self.plan)
        takes_s = (self.network.gather_s if gathers else self.network.reduce_s)(members, num_bytes)
        before_s = max((s for (g, _), s in self.summed_s.items() if g == event.peer), default=0.0)
        until_s = max(before_s, *present.values()) + takes_s
        del self.present[key]
        if issued:
            self.summed_s[key] = until_s
            return here
        for member in here:
            other = self.ranks[member]
            other.wait(other.items[other.at], until_s)
            other.at += 1
        return here
