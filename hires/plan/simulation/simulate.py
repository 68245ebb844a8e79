"""Simulates how long a step of a plan takes: a discrete-event simulation of one replica.

A message sets out when both sides have posted it (rendezvous) and its link is free, and a rank that
waits for it continues when it has arrived. So the times of a step follow from one walk through the
graph of the proof (:mod:`hires.plan.step_order`), each node of which takes some time.

Links serve messages in the order in which they would set out if all took no time. So every time is
a sum or a maximum of earlier ones, and nothing that gets faster makes anything slower, as it could
where a link chose whom to serve next.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hires.plan.event import MEETING, WORLD, Event
from hires.plan.groups import groups, num_lanes
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.simulation.costs import Item, Roofline, timed_program
from hires.plan.step_order import MESSAGE, Node, StepGraph


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
    far: Link = Link()
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
        nodes = {*map(self.node_of, ranks)}
        if len(nodes) == 1:
            return self.near
        # Where several ranks of a node take part, their bytes pass a link of the node, too.
        slower = self.near.bytes_per_s < self.far.bytes_per_s and len(nodes) < len(ranks)
        return Link(self.far.latency_s, self.near.bytes_per_s) if slower else self.far

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

    def meeting_s(self, ranks: list[int], event: Event) -> float:
        """Returns how long a collective takes from its last member's arrival."""
        if event.operation in ("broadcast", "reduce_scatter"):  # in parts: each passes one on
            return self.gather_s(ranks, event.num_bytes / len(ranks))
        seconds_of = self.gather_s if event.operation == "all_gather" else self.reduce_s
        return seconds_of(ranks, event.num_bytes)

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


@dataclass
class Simulation:
    """The predicted time line of one step of one replica."""

    ranks: list[list[tuple[Item, float]]]
    """What takes time of every rank, in order, and when each ends."""
    unlinked_s: float
    """What the step takes if messages take no time."""

    @property
    def step_s(self) -> float:
        """When the last rank has done everything."""
        return max((own[-1][1] for own in self.ranks if own), default=0.0)

    @property
    def busy_s(self) -> float:
        """Seconds of computation of all ranks."""
        return sum(item.seconds for own in self.ranks for item, _ in own)


def simulate(plan: Plan, costs: Roofline, network: Network | None = None) -> Simulation:
    """Returns what a step of a deadlock-free plan takes; no network: messages take no time."""
    return PlannedStep(plan).simulated(costs, network)


class PlannedStep:
    """A step of a deadlock-free plan, which may be simulated several times."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._graph = plan, _TimedGraph(plan, [])
        self._events = [[*events(plan, rank)] for rank in range(plan.ranks_per_replica)]

    def simulated(self, costs: Roofline, network: Network | None = None) -> Simulation:
        """Returns what it takes, as :func:`simulate`."""
        pairs = enumerate(self._events)
        programs = [timed_program(self._plan, rank, costs, own) for rank, own in pairs]
        waited_for = [[item.event for item in program] for program in programs]
        if self._graph.events != waited_for:
            self._graph = _TimedGraph(self._plan, waited_for)
        graph = self._graph
        graph.seconds = [0.0] * len(graph.behind)
        for program, places in zip(programs, graph.places, strict=True):
            for item, place in zip(program, places, strict=True):
                graph.seconds[place] += item.seconds
        end_s, order = graph.times(Network(), [])
        unlinked_s = max(end_s, default=0.0)
        if network is not None and network != Network():
            messages = [node for node in order if node in graph.sends]
            end_s, _ = graph.times(network, sorted(messages, key=end_s.__getitem__))
        ranks = [
            [(item, end_s[node]) for item, node in zip(program, places, strict=True)]
            for program, places in zip(programs, graph.places, strict=True)
        ]
        return Simulation(ranks, unlinked_s)


class _TimedGraph:
    """The graph of a step, whose nodes have numbers here, and the seconds that each computes."""

    seconds: list[float]

    def __init__(self, plan: Plan, of_ranks: list[list[Event]]) -> None:
        self.members = dict(enumerate(groups(plan)))
        self.members[WORLD] = [*range(plan.world)]
        self.events = of_ranks
        step, calls, every = StepGraph(), dict[Node, Event](), []
        for rank, own_events in enumerate(of_ranks):
            read = step.read(rank, own_events)
            every.append(read.waits)
            for group, met in read.meetings.items():
                calls |= {(MEETING, *group, at): event for at, event in enumerate(met)}
        number = {node: place for place, node in enumerate(step.graph)}
        self.behind = [[number[other] for other in behind] for behind in step.graph.values()]
        self.calls = {number[node]: event for node, event in calls.items()}
        self.sends = {
            place: step.events["send", node[1]]
            for node, place in number.items()
            if node[0] == MESSAGE
        }
        # Sums under way at once share the links of their ranks: the bytes of one follow those of
        # another, and only their latencies pass at the same time.
        self.side_by_side: dict[int, list[int]] = {}
        before: dict[str, int] = {}
        for place in sorted(self.calls, key=lambda one: self.calls[one].tag):
            event = self.calls[place]
            if event.role == "issue" and num_lanes(plan) > 1:
                stage, _, _ = event.what.partition(",")
                self.side_by_side[place] = [before[stage]] if stage in before else []
                before[stage] = place
        self.readers: list[list[int]] = [[] for _ in self.behind]
        for place, behind in enumerate(self.behind):
            for other in behind:
                self.readers[other].append(place)
        self.places: list[list[int]] = []  # by rank: the node that ends each event
        for own_events, waits in zip(of_ranks, map(iter, every), strict=True):
            own: list[int] = []
            for event in own_events:  # a sum that is issued holds up no rank
                own.append(own[-1] if event.role == "issue" else number[next(waits).node])
            self.places.append(own)

    def times(self, network: Network, order: Sequence[int]) -> tuple[list[float], list[int]]:
        """Returns when each node ends, and all nodes in an order in which each is behind others.

        Links serve the messages in ``order``; without one, each as soon as both sides posted it.
        """
        served: dict[int, list[int]] = {node: [] for node in order}  # those before on its links
        last: dict[tuple[str, int, int], int] = {}
        for node in order:
            source, event = self.sends[node]
            for lane in network.lanes(source, event.peer):
                served[node] += [last[lane]] if lane in last else []
                last[lane] = node
        end_s = [0.0] * len(self.behind)
        passed_s: dict[int, float] = {}  # when the links of a message are free again
        left = [*map(len, self.behind)]  # nodes that are not timed yet, of those before each
        later: dict[int, list[int]] = {}  # messages behind one on its links
        for node, before in (*served.items(), *self.side_by_side.items()):
            left[node] += len(before)
            for other in before:
                later.setdefault(other, []).append(node)
        ready, done = [node for node, count in enumerate(left) if not count], list[int]()
        while ready:
            node = ready.pop()
            done.append(node)
            for reader in (*self.readers[node], *later.get(node, ())):
                left[reader] -= 1
                if not left[reader]:
                    ready.append(reader)
            begin_s = 0.0
            for other in self.behind[node]:
                begin_s = max(begin_s, end_s[other])
            if node in served:
                source, event = self.sends[node]
                busy_s, latency_s = network.message_s(source, event.peer, event.num_bytes, event)
                begin_s = max(begin_s, *(passed_s[other] for other in served[node]), 0.0)
                passed_s[node] = begin_s + busy_s
                end_s[node] = passed_s[node] + latency_s
            elif node in self.calls:
                event = self.calls[node]
                ranks = self.members[event.peer]
                seconds = network.meeting_s(ranks, event)
                if node in self.side_by_side:
                    begin_s = max(begin_s, *(passed_s[one] for one in self.side_by_side[node]), 0.0)
                    latency_s = network.meeting_s(ranks, event._replace(shape=(0,)))
                    passed_s[node] = begin_s + max(0.0, seconds - latency_s)
                end_s[node] = begin_s + seconds
            else:
                end_s[node] = begin_s + self.seconds[node]
        assert len(done) == len(left), "nodes of a step wait for each other in a circle"
        return end_s, done
