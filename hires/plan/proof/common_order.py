r"""Proves that the events of a plan have a common order, without the abstract machine.

Suppose all events of all ranks have an order that keeps that of each program, in which each event
comes behind what it waits for:

    send, recv      a send to a mailbox: behind the wait that frees its slot
    wait_recv       behind the send of the message
    wait_send(s)    behind the receives of the messages
    collective      one event for all its members

Then no rank blocks another for ever: the first event in this order that is never reached would need
earlier ones only. So the proof is that this graph has no circle:

    rank 0    send a ------ wait_recv b          rank 0    wait_recv b --- send a
                    \\     /                                       ^           |
                     X                                            |           v
                    /     \\                      rank 1         send b <-- wait_recv a
    rank 1    send b ------ wait_recv a          a circle: the machine explains it

It holds whatever backends carry the messages, since an event comes behind all that any of them
waits for. Messages of one lane between two ranks are sent and received in one order, and mailboxes
are read in the order of writing. On a stream the posts of one call are a unit, which two more
events describe:

    head        of a post: its unit is the first of its stream: behind the post, and behind the done
                of the unit before it
    done        of a unit: behind the head of each of its posts and of the other side of each
    wait_recv   behind the done of its unit, and so is wait_send(s)

Tiles in the same place among their neighbours have the same program but for the numbers of their
peers, nine kinds in a grid of any size. So one of each is read (``rank_kinds.translated_kinds``),
and equal events of all ranks are one node: a circle of ranks would be a circle of these.

Where no order is found there is no proof here, and the machine decides and explains.
"""

from __future__ import annotations

import graphlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import ALONE, JOINT, MEETINGS, POSTS, WORLD, Event
from hires.plan.proof.machine import OTHER, Proof, is_mail

Message = tuple[int, int]
"""(tag, how many of the tag went the same way between the two ranks before)."""
Graph = dict[Hashable, set[Hashable]]
"""Event -> those that it comes behind; equal events of several ranks are one."""


class NoCommonOrderError(Exception):
    """There is none that is seen here, which does not mean that ranks block each other."""


@dataclass
class _Program:
    """What the program of one rank shares with others."""

    posts: dict[int, dict[tuple[str, int], list[Any]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """By distance of the peer's number, then by (``send`` or ``recv``, lane), in order: the message
    and what both sides must agree on."""
    joint: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """Collectives and sums by group, in order."""


class _Unit:
    """The posts of one call on one stream."""

    def __init__(self, call: int, done: Hashable, before: _Unit | None) -> None:
        self.call, self.done = call, done
        self._before = set() if before is None else {before.done}

    def add(self, post: Hashable, other: Hashable, graph: Graph) -> None:
        """Adds a post, whose other side is ``other``, and what it means for the unit."""
        graph.setdefault(("head", post), set()).update(self._before, {post})
        graph.setdefault(self.done, set()).update({("head", post), ("head", other)})


def prove_in_order(
    programs: Sequence[Iterator[Event]],
    members: Sequence[Sequence[int]],
    kinds: Sequence[int] | None = None,
) -> Proof | None:
    """Returns the proof of programs with a common order, or None: then the machine decides.

    ``kinds`` has for each rank the one whose program stands for its own, with peers at the same
    distances. None: each rank stands for itself.
    """
    kinds = range(len(programs)) if kinds is None else kinds
    graph: Graph = {}
    try:
        read = {rank: _read(rank, programs[rank], graph) for rank in sorted(set(kinds))}
        graphlib.TopologicalSorter(graph).prepare()
    except (NoCommonOrderError, graphlib.CycleError):
        return None
    proof = Proof()
    compared: set[tuple[int, int, int]] = set()
    for rank, kind in enumerate(kinds):
        for distance, posts in read[kind].posts.items():
            proof.num_messages += sum(len(m) for (way, _), m in posts.items() if way == "send")
            peer = rank + distance
            if not 0 <= peer < len(kinds):
                return None
            if (pair := (kind, distance, kinds[peer])) not in compared:
                other = read[kinds[peer]].posts.get(-distance, {})
                if other != {(OTHER[way], lane): own for (way, lane), own in posts.items()}:
                    return None
                compared.add(pair)
    groups: dict[int, set[int]] = {WORLD: set(range(len(kinds)))}
    groups |= {index: set(ranks) for index, ranks in enumerate(members)}
    for rank, kind in enumerate(kinds):
        if any(rank not in groups.get(group, ()) for group in read[kind].joint):
            return None
    for group, ranks in groups.items():
        calls = [read[kind].joint.get(group, []) for kind in {kinds[r] for r in ranks}]
        first = calls[0] if calls else []
        if any(other != first for other in calls):
            return None
        proof.num_collectives += sum(event.kind in JOINT for event in first)
    return proof


def _read(rank: int, program: Iterator[Event], graph: Graph) -> _Program:
    """Adds the events of a rank to the graph; checks that it waits for what it receives."""
    own = _Program()
    counts: Counter[Hashable] = Counter()
    # By (send or recv, peer, tag): messages not waited for, each with the end of its unit.
    open_posts: dict[tuple[str, int, int], list[tuple[Message, Hashable]]] = defaultdict(list)
    units: dict[Hashable, _Unit] = {}  # the last one of each stream
    boxes: dict[Hashable, list[Message]] = defaultdict(list)  # what went to or came by mailboxes
    unread: dict[Hashable, list[Message]] = defaultdict(list)
    last: Hashable = None
    for event in program:
        kind, peer, tag = event[:3]
        behind: set[Hashable] = set()
        node: Hashable = None
        if kind in ALONE:
            continue
        if kind in POSTS:
            message = tag, counts[kind, peer, tag]
            counts[kind, peer, tag] += 1
            node = kind, message
            # Tag, shape, dtype, words, lane, channel and route.
            facts = message, event[2:7], event.channel, event.route
            own.posts[peer - rank][kind, event.lane].append(facts)
            stream = event.channel or (kind, peer, event.lane)
            unit = units.get(stream)
            if unit is None or not event.call or event.call != unit.call:
                unit = units[stream] = _Unit(event.call, ("done", node), unit)
            unit.add(node, (OTHER[kind], message), graph)
            open_posts[kind, peer, tag].append((message, unit.done))
            if is_mail(event) and kind == "send":
                box = boxes[peer, event.lane]
                box.append(message)
                if len(box) > SLOTS:
                    behind.add(("wait_recv", box[-1 - SLOTS]))
            elif is_mail(event):
                unread[peer, event.lane].append(message)
        elif kind == "wait_recv":
            if not open_posts["recv", peer, tag]:
                raise NoCommonOrderError
            message, done = open_posts["recv", peer, tag].pop(0)
            node = kind, message
            behind.add(done)
            if is_mail(event):
                mails = unread[peer, event.lane]
                if mails[:1] != [message]:
                    raise NoCommonOrderError
                del mails[0]
        elif kind in ("wait_send", "wait_sends"):
            keys = [("send", peer, tag)]
            if kind == "wait_sends":
                keys = [key for key in open_posts if key[0] == "send"]
            for key in keys:
                behind.update(done for _, done in open_posts.pop(key, []))
            counts["waits"] += 1
            node = rank, counts["waits"]
        elif kind in MEETINGS or kind == "issue":
            node = "joint", peer, len(own.joint[peer])
            own.joint[peer].append(event)
            counts["issued", peer, tag] += kind == "issue"
        elif kind == "wait_issued" and counts["issued", peer, tag]:
            counts["issued", peer, tag] -= 1
        else:
            raise NoCommonOrderError
        node = last if node is None else node
        graph.setdefault(node, set()).update(behind, {last} - {None, node})
        last = node
    if any(posts for (kind, _, _), posts in open_posts.items() if kind == "recv"):
        raise NoCommonOrderError
    return own
