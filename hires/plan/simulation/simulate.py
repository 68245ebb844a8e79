"""Simulates how long a step of a plan takes: a discrete-event simulation of one replica.

A message sets out when both sides have posted it (rendezvous) and its link is free, and a rank that
waits for it goes on when it has arrived. So a step is a graph of points in time without a circle,
and one walk in the order of the graph gives all of them.

Links serve messages in the order in which they would set out if all took no time. So every time is
a sum or a maximum of earlier ones, and nothing that gets faster makes anything slower, as it could
where a link chose whom to serve next.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from hires.core.ranks.timeline import BACKWARD, COLLECTIVE, FORWARD, HALO, Span, StepSpans
from hires.plan.event import DIVIDED, JOINT, OF_WORLD, POSTS, WORLD, Event
from hires.plan.groups import groups
from hires.plan.ownership import PUBLISH
from hires.plan.plan import Plan
from hires.plan.simulation.costs import Costs, Item, timed_program
from hires.plan.traffic import Operation, operations


@dataclass(frozen=True)
class Link:
    """What lies between two ranks."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def travel_s(self, num_bytes: float) -> float:
        """Returns for how long a message keeps the link busy; it arrives a latency later."""
        return num_bytes / self.bytes_per_s


class PassingTime(NamedTuple):
    """What a message takes."""

    busy_s: float
    """Its lanes carry no other."""
    latency_s: float


@dataclass(frozen=True)
class Network:
    """The links of a machine whose ranks fill one node after the other.

    Any two ranks of one node have a link each way; all of them share one way out and one way in.
    """

    near: Link = Link()
    """Between ranks of one node."""
    far: Link = Link()
    """Between nodes."""
    node_starts: tuple[int, ...] = ()
    """First rank of each node but the first one."""
    small_latency_s: float | None = None
    """Of a message of a small collective within a node; unset: that of the link."""
    reduce_bytes_per_s: float | None = None
    """Of an all-reduce within a node, which adds what it carries; unset: that of the link."""
    crowd: float = 1.0
    """Ranks that compute at once for each core, at least 1: it scales the time of messages."""

    def node_of(self, rank: int) -> int:
        """Returns the node that a rank is on."""
        return bisect.bisect(self.node_starts, rank)

    def link(self, ranks: list[int]) -> Link:
        """Returns the slowest link among some ranks."""
        return self.near if self.node_of(min(ranks)) == self.node_of(max(ranks)) else self.far

    def lanes(self, source: int, target: int) -> list[tuple[str, int, int]]:
        """Returns what a message occupies, one message at a time each."""
        here, there = self.node_of(source), self.node_of(target)
        if here == there:
            return [("near", source, target)]
        return [("out", here, 0), ("in", there, 0)]

    def message_s(self, source: int, target: int, num_bytes: int, event: Event) -> PassingTime:
        """Returns how long a message keeps its lanes busy, and when it arrives after that."""
        link = self.link([source, target])
        return PassingTime(self.crowd * link.travel_s(num_bytes), self.crowd * link.latency_s)

    def meeting_s(self, ranks: list[int], call: Operation, event: Event) -> float:
        """Returns how long a collective takes from its last member's arrival."""
        if call.operation in ("broadcast", "reduce_scatter"):  # in parts: each passes one on
            return self.gather_s(ranks, call.num_bytes / len(ranks))
        seconds_of = self.gather_s if call.operation == "all_gather" else self.reduce_s
        return seconds_of(ranks, call.num_bytes)

    def gather_s(self, ranks: list[int], num_bytes: float) -> float:
        """Returns how long an all-gather takes from its last arrival; each hands in the bytes."""
        link = self.link(ranks)
        latency_s = link.latency_s
        if link is self.near and self.small_latency_s is not None:
            latency_s = self.small_latency_s
        rounds = (len(ranks) - 1).bit_length()
        return self.crowd * (rounds * latency_s + (len(ranks) - 1) * link.travel_s(num_bytes))

    def reduce_s(self, ranks: list[int], num_bytes: float) -> float:
        """Returns how long an all-reduce takes from its last member's arrival.

        Any algorithm sends 2 (n - 1) / n of the bytes at the least, here in twice the rounds.
        """
        link = self.link(ranks)
        if link is self.near and self.reduce_bytes_per_s is not None:
            link = Link(link.latency_s, self.reduce_bytes_per_s)
        share = 2 * (len(ranks) - 1) / len(ranks)
        rounds = (len(ranks) - 1).bit_length()
        return self.crowd * (2 * rounds * link.latency_s + share * link.travel_s(num_bytes))


class Message(NamedTuple):
    """One message: how many of its tag go the same way before it."""

    source: int
    target: int
    tag: int
    number: int


class Meeting(NamedTuple):
    """A collective, or a sum (``issue``): how many of its tag the group has before it."""

    kind: str
    group: int
    tag: int
    number: int


Point = tuple[int, int] | Message | Meeting
"""(rank, place in its program), or where ranks meet."""


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
    computing: list[list[tuple[float, float]]]
    """When every rank computes: begins and ends, in order."""
    unlinked_s: float = 0.0
    """What the step takes if messages take no time."""

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        busy = sum(sum(kinds.values()) for kinds in self.busy_s)
        return 1 - busy / (len(self.ranks) * self.step_s) if self.step_s else 0.0


def simulate(plan: Plan, costs: Costs, network: Network | None = None) -> Simulation:
    """Returns what a step of a deadlock-free plan takes; no network: messages take no time."""
    programs = [timed_program(plan, rank, costs) for rank in range(plan.ranks_per_replica)]
    points = _Points(plan)
    for rank, program in enumerate(programs):
        points.add(rank, program)
    end_s = points.times(Network(), [])
    unlinked_s = max(end_s.values(), default=0.0)
    if network is not None and network != Network():
        messages = [point for point in end_s if isinstance(point, Message)]
        end_s = points.times(network, sorted(messages, key=lambda message: end_s[message]))
    made = _simulation(programs, end_s)
    made.unlinked_s = unlinked_s
    return made


class _Points:
    """What each point of a step comes behind: its rank's place before it, and what it waits for.

    A message is behind both of its posts, and both waits for it are behind the message:

        rank 0   F0   send a ---.          wait a
        rank 1   recv a ------ a ------ wait a   F0
    """

    def __init__(self, plan: Plan) -> None:
        self.members = dict(enumerate(groups(plan)))
        self.members[WORLD] = [*range(plan.world)]
        self.plan = plan
        self.behind: dict[Point, list[Point]] = defaultdict(list)
        self.seconds: dict[Point, float] = {}  # that a place takes
        self.calls: dict[Point, Operation] = {}  # that a message or meeting stands for
        self.events: dict[Point, Event] = {}  # that begin it

    def add(self, rank: int, program: list[Item]) -> None:
        """Adds what a rank does."""
        counts: Counter[tuple[str, int, int]] = Counter()
        sends: dict[tuple[int, int], list[Message]] = defaultdict(list)  # by peer and tag
        sums: dict[int, Meeting] = {}  # the last one of each group
        for at, item in enumerate(program):
            here, event = (rank, at), item.event
            self.seconds[here] = item.seconds
            needs = self.behind[here]
            needs += [(rank, at - 1)] if at else []
            if event is None:
                continue
            kind, peer, tag = event.kind, event.peer, event.tag
            number = counts[kind, peer, tag]
            counts[kind, peer, tag] += 1
            ends = (rank, peer) if kind in ("send", "wait_send") else (peer, rank)
            message = Message(*ends, tag, number)
            meeting = Meeting(kind.replace("wait_issued", "issue"), peer, tag, number)
            if kind in (*POSTS, *JOINT):
                point = message if kind in POSTS else meeting
                if point not in self.calls:
                    [call] = operations(self.plan, rank, [event])
                    assert call is not None
                    self.calls[point] = call
                self.events[point] = event
            if kind in POSTS:
                self.behind[message].append(here)
                if kind == "send":
                    sends[peer, tag].append(message)
            elif kind == "wait_recv":
                needs.append(message)
            elif kind == "wait_issued":
                needs.append(meeting)
            elif kind in ("collective", *OF_WORLD, PUBLISH, *DIVIDED):
                self.behind[meeting] += needs
                needs.append(meeting)
            elif kind == "issue":  # the sums of a group run one after the other
                self.behind[meeting] += [here, sums[peer]] if peer in sums else [here]
                sums[peer] = meeting
            else:
                every = kind == "wait_sends"
                needs += [*itertools.chain(*sends.values())] if every else sends[peer, tag]

    def times(self, network: Network, order: list[Message]) -> dict[Point, float]:
        """Returns when each point ends.

        Links serve the messages in an order; without one, each as soon as both sides posted it.
        """
        served: dict[Point, list[Message]] = defaultdict(list)  # those before on the same links
        last: dict[tuple[str, int, int], Message] = {}
        for message in order:
            for lane in network.lanes(message.source, message.target):
                served[message] += [last[lane]] if lane in last else []
                last[lane] = message
        end_s: dict[Point, float] = {}
        passed_s: dict[Message, float] = {}  # when the links of a message are free again
        readers: dict[Point, list[Point]] = defaultdict(list)
        left: dict[Point, int] = {}  # points that are not timed yet, of those before each
        for point, behind in self.behind.items():
            before = [*behind, *served[point]] if point in served else behind
            left[point] = len(before)
            for other in before:
                readers[other].append(point)
        ready = [point for point, count in left.items() if not count]
        while ready:
            point = ready.pop()
            for reader in readers[point]:
                left[reader] -= 1
                if not left[reader]:
                    ready.append(reader)
            begin_s = max((end_s[other] for other in self.behind[point]), default=0.0)
            if isinstance(point, Message):
                num_bytes, event = self.calls[point].num_bytes, self.events[point]
                source, target = point.source, point.target
                busy_s, latency_s = network.message_s(source, target, num_bytes, event)
                begin_s = max(begin_s, *(passed_s[other] for other in served[point]), 0.0)
                passed_s[point] = begin_s + busy_s
                end_s[point] = passed_s[point] + latency_s
            elif isinstance(point, Meeting):
                ranks, call = self.members[point.group], self.calls[point]
                end_s[point] = begin_s + network.meeting_s(ranks, call, self.events[point])
            else:
                end_s[point] = begin_s + self.seconds[point]
        assert len(end_s) == len(left), "points of a step wait for each other in a circle"
        return end_s


def _simulation(programs: list[list[Item]], end_s: dict[Point, float]) -> Simulation:
    made = Simulation(max(end_s.values(), default=0.0), [], [], [], [])
    for rank, program in enumerate(programs):
        spans: list[Span] = []
        passes: dict[str, list[float]] = {}  # when an action began and ended
        busy_s: dict[str, float] = defaultdict(float)
        waiting_s: dict[str, float] = defaultdict(float)
        computing: list[tuple[float, float]] = []
        now_s = 0.0
        for at, (kind, action, event, seconds) in enumerate(program):
            begin_s, now_s = now_s, end_s[rank, at]
            if event is None:
                busy_s[kind] += seconds
                if seconds and computing and computing[-1][1] == now_s - seconds:
                    computing[-1] = computing[-1][0], now_s
                elif seconds:
                    computing.append((now_s - seconds, now_s))
            elif now_s > begin_s:
                waiting_s[kind] += now_s - begin_s
            if kind in (FORWARD, BACKWARD, HALO, COLLECTIVE):
                passes.setdefault(action, [begin_s, begin_s])[1] = now_s
            if kind not in (FORWARD, BACKWARD) and now_s > begin_s:
                spans.append(Span(kind, action, begin_s, now_s, event.what if event else ""))
        for action, (first_s, last_s) in passes.items():
            spans.append(Span(FORWARD if action[0] == "F" else BACKWARD, action, first_s, last_s))
        spans.sort(key=lambda span: (span.begin_s, -span.end_s))
        made.ranks.append(StepSpans(rank, 0, "", 0.0, spans))
        made.busy_s.append(dict(busy_s))
        made.waiting_s.append(dict(waiting_s))
        made.computing.append(computing)
    return made
