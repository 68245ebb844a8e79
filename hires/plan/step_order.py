r"""Builds the graph of what the events of a step wait for, and finds which of them are reached.

No receive is a wildcard and no rank looks at a clock, so a step ends if and only if its events have
an order in which each comes behind what it waits for. The simulation of a step's time asks the same
graph for its longest path.

    message         behind its two posts
    wait_recv       behind the message
    wait_send(s)    behind the messages
    collective      behind all that its members do before it, and the one before it of its group

    rank 0    send a ------ wait_recv b          rank 0    wait_recv b --- send a
                    \     /                                       ^           |
                     X                                            |           v
                    /     \                      rank 1         send b <-- wait_recv a
    rank 1    send b ------ wait_recv a          a cycle: nobody sends first

What a post and a wait mean follows from the route of the message:

* ``gloo``, ``mpi`` and ``shm`` buffer nothing here: a send ends with its message. Messages of one
  tag between two ranks keep their order, others pass each other.
* ``nccl`` has a stream for each communicator (``hires.plan.message_routes``). A post holds up those
  behind it, and what a rank posts there in one call is a unit, which two more events describe:

      head        of a post: its unit is the first of its stream: behind the post, and behind the
                  done of the unit before it
      done        of a unit: behind the messages of its posts, which are behind the heads of both
                  sides there

Backends do not see each other: a tag means a message within one backend, and the collectives of a
group have one order for each backend. A collective begins when all members have come to it, and a
rank does not go on before it is done: the worst case for nccl too. A sum that is issued is waited
for by ``wait_issued`` alone. Also assumed of nccl: communicators exist before the first step, their
kernels run side by side, and nothing is buffered. More waiting can add deadlocks, never hide one.

Tiles in the same place among their neighbours have the same program but for the numbers of their
peers. So first one of each kind is read (``rank_kinds.equal_programs``), and equal events of all
ranks are one node: a cycle of ranks would be a cycle of these. Only where that has a cycle, each
rank's events are nodes of their own.

Source:
    NCCL user guide, "Point-to-point communication" (calls within a group progress independently,
    the group blocks until all are complete) and "Group calls".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hires.plan.event import ALONE, MEETING, POSTS, WORLD, Event
from hires.plan.routes import STREAMED

Node = Any
"""A tuple: the kind or rank of the event, then values that identify it."""
Graph = dict[Node, list[Node]]
"""Node -> those that it comes behind; one that is no key is never reached."""
OTHER = {"send": "recv", "recv": "send"}
MESSAGE = "message"
"""Begins the node of a message, as ``MEETING`` that of a collective."""


@dataclass(slots=True)
class RankEvent:
    """Where a rank may stand: an event that waits for others, or a post."""

    node: Node
    event: Event
    messages: Sequence[tuple[Node, Event]] = ()
    """The sends that it waits for, each with the node that ends it."""
    meeting: Node = None
    is_early: bool = False
    """Whether the rank has not begun to receive the message that it waits for."""


@dataclass
class Program:
    """The nodes of one rank, in order."""

    waits: list[RankEvent] = field(default_factory=list)
    posts: dict[int, dict[tuple[str, int], list[Any]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """By distance of the peer's number, then by (``send`` or ``recv``, lane), in order: the message
    and what both sides must agree on."""
    meetings: dict[tuple[int, str], list[Event]] = field(default_factory=lambda: defaultdict(list))
    """Collectives and sums by group and backend, in order."""
    unread: list[tuple[Node, Event]] = field(default_factory=list)
    """Receives that the rank never waits for."""


class Unit:
    """The posts of one call on one stream: they begin and end together."""

    def __init__(self, rank: int, call: int, done: Node, before: Unit | None) -> None:
        self.rank, self.call, self.done = rank, call, done
        self.before = [] if before is None else [before.done]
        self.posts: list[tuple[Node, Event]] = []


class StepGraph:
    """What waits for what, of the programs that were read."""

    def __init__(self, is_merged: bool = False) -> None:
        self.is_merged = is_merged
        """Whether equal events of several ranks are one node."""
        self.graph: Graph = {}
        self.units: dict[Node, Unit] = {}
        """By the node that ends them."""
        self.came: dict[Node, dict[int, Node]] = defaultdict(dict)
        """Meeting -> rank -> its last node before it."""
        self.events: dict[Node, tuple[int, Event]] = {}
        """Post -> its rank and event."""

    def read(self, rank: int, events: Iterable[Event]) -> Program:
        """Adds the events of a rank."""
        reader = _Reader(self, rank)
        for event in events:
            reader.add(event)
        for (kind, *_), posts in reader.open_posts.items():
            if kind == "recv":
                reader.program.unread += [(post, event) for post, _, event in posts[:1]]
        return reader.program


class _Reader:
    def __init__(self, step: StepGraph, rank: int) -> None:
        self.step, self.graph, self.rank = step, step.graph, rank
        self.program = Program()
        self.counts: Counter[Hashable] = Counter()
        # By (send or recv, peer, backend, tag): (post, what ends it, event), not waited for.
        self.open_posts: dict[tuple[Any, ...], list[tuple[Node, Node, Event]]] = defaultdict(list)
        self.units: dict[Hashable, Unit] = {}  # the last one of each stream
        self.early: dict[Hashable, list[RankEvent]] = defaultdict(list)
        self.issued: dict[Hashable, list[Node]] = defaultdict(list)
        self.last: list[Node] = []  # the last node, or nothing at the beginning

    def add(self, event: Event) -> None:
        """Adds an event behind those before it."""
        wait = RankEvent((self.rank, len(self.program.waits)), event)
        behind: list[Node] = []
        role = event.role
        if role in POSTS:
            self._post(event, wait)
        elif role == "wait_recv":
            behind = self._wait_recv(event, wait)
        elif role in ("wait_send", "wait_sends"):
            behind = self._wait_sends(event, wait)
        elif role == "wait_issued":
            begun = self.issued[event.peer, event.tag]
            wait.meeting = begun.pop(0) if begun else ("never issued", wait.node)
            behind = [wait.meeting]
        elif role == "issue":  # the rank does not wait for it
            meeting = self._meet(event)
            self.graph[meeting] += self.last
            self.issued[event.peer, event.tag].append(meeting)
            return
        elif role == MEETING:
            wait.node = wait.meeting = self._meet(event)
        else:
            assert role == ALONE, event.kind
        if self.last != [wait.node]:  # as equal messages to two peers, where events are merged
            behind += self.last
        self.graph.setdefault(wait.node, []).extend(behind)
        self.program.waits.append(wait)
        self.last = [wait.node]

    def _post(self, event: Event, wait: RankEvent) -> None:
        kind, peer = event.role, event.peer
        is_merged = self.step.is_merged
        # Halos of one exchange are one node, whatever carries them to which peer.
        way = event.tag if is_merged else way_of(event)
        number = self.counts[kind, peer, way]
        self.counts[kind, peer, way] += 1
        ends = (self.rank, peer) if kind == "send" else (peer, self.rank)
        message = (way, number) if is_merged else (*ends, way, number)
        node = wait.node = kind, message
        self.step.events[node] = self.rank, event
        if is_merged:
            facts = message, event.agreed, event.lane, event.channel
            self.program.posts[peer - self.rank][kind, event.lane].append(facts)
        end: Node = (MESSAGE, message)
        sides: list[Node] = [node, (OTHER[kind], message)]
        if event.backend in STREAMED:
            sides = [("head", side) for side in sides]
            end = self._unit(event, node, end).done
        self.graph.setdefault((MESSAGE, message), sides)
        key = kind, peer, event.backend, event.tag
        if kind == "recv" and self.early[key]:  # nothing that is behind a wait ends it
            self.graph[self.early[key].pop(0).node].append(node)
        else:
            self.open_posts[key].append((node, end, event))

    def _unit(self, event: Event, node: Node, message: Node) -> Unit:
        """Adds a post to its unit, and what it means for this."""
        stream = event.backend, event.channel or (event.peer, event.lane)
        unit = self.units.get(stream)
        if unit is None or not event.call or event.call != unit.call:
            unit = self.units[stream] = Unit(self.rank, event.call, ("done", node), unit)
            self.step.units[unit.done] = unit
        unit.posts.append((node, event))
        self.graph.setdefault(("head", node), []).extend((*unit.before, node))
        self.graph.setdefault(unit.done, []).append(message)
        return unit

    def _wait_recv(self, event: Event, wait: RankEvent) -> list[Node]:
        key = "recv", event.peer, event.backend, event.tag
        if not self.open_posts[key]:
            wait.is_early = True
            self.early[key].append(wait)
            return [("early", wait.node)]
        post, end, _ = self.open_posts[key].pop(0)
        if self.step.is_merged:
            wait.node = "read", post[1]
        return [end]

    def _wait_sends(self, event: Event, wait: RankEvent) -> list[Node]:
        keys = [("send", event.peer, event.backend, event.tag)]
        if event.role == "wait_sends":
            keys = [key for key in self.open_posts if key[0] == "send"]
        posts = [post for key in keys for post in self.open_posts.pop(key, ())]
        wait.messages = [(end, post) for _, end, post in posts]
        return [end for _, end, _ in posts]

    def _meet(self, event: Event) -> Node:
        calls = self.program.meetings[event.peer, event.backend]
        *group, number = meeting = MEETING, event.peer, event.backend, len(calls)
        calls.append(event)
        if meeting not in self.graph:  # the collectives of a group run one after the other
            self.graph[meeting] = [(*group, number - 1)] if number else []
        self.step.came[meeting][self.rank] = self.last[0] if self.last else None
        return meeting


def reached(graph: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """Returns the nodes that have an order in which each is behind those that it waits for."""
    left = {node: len(behind) for node, behind in graph.items()}
    followers: dict[Node, list[Node]] = defaultdict(list)
    for node, behind in graph.items():
        for other in behind:
            followers[other].append(node)
    ready = [node for node, count in left.items() if not count]
    nodes = set[Node]()
    while ready:
        node = ready.pop()
        nodes.add(node)
        for follower in followers.get(node, ()):
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)
    return nodes


def prove_merged(
    programs: Sequence[Iterable[Event]],
    members: Sequence[Sequence[int]],
    kinds: Sequence[int] | None = None,
    first: int = 0,
) -> bool:
    """Whether the merged events of programs have an order; if not, that shows nothing.

    ``kinds`` has for each rank the one whose program stands for its own, with peers at the same
    distances. None: each rank stands for itself. Groups number the ranks from ``first`` on.
    """
    kinds = range(len(programs)) if kinds is None else kinds
    step = StepGraph(is_merged=True)
    read = {rank: step.read(first + rank, programs[rank]) for rank in sorted(set(kinds))}
    if len(reached(step.graph)) < len(step.graph) or any(one.unread for one in read.values()):
        return False
    compared: set[tuple[int, int, int]] = set()
    for rank, kind in enumerate(kinds):
        for distance, posts in read[kind].posts.items():
            peer = rank + distance
            if not 0 <= peer < len(kinds):
                return False
            if (pair := (kind, distance, kinds[peer])) not in compared:
                other = read[kinds[peer]].posts.get(-distance, {})
                if other != {(OTHER[way], lane): own for (way, lane), own in posts.items()}:
                    return False
                compared.add(pair)
    groups: dict[int, set[int]] = {WORLD: set(range(len(kinds)))}
    groups |= {index: {rank - first for rank in ranks} for index, ranks in enumerate(members)}
    for rank, kind in enumerate(kinds):
        if any(rank not in groups.get(group, ()) for group, _ in read[kind].meetings):
            return False
    meetings = {key: None for one in read.values() for key in one.meetings}
    for group, backend in meetings:
        calls = [
            read[kind].meetings.get((group, backend), [])
            for kind in {kinds[r] for r in groups[group]}
        ]
        if any(other != calls[0] for other in calls[1:]):
            return False
    return True


def tag_of(event: Event) -> Hashable:
    """Returns what a wait names its message by: the tag within its backend."""
    return event.backend, event.tag


def way_of(event: Event) -> Hashable:
    """Returns what messages from one rank to another share that keep their order."""
    if event.backend in STREAMED:
        return event.backend, ("channel", event.channel) if event.channel else event.lane
    return tag_of(event)
