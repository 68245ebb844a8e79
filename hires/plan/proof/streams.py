"""Semantics in which messages between two ranks run in the order of posting, on streams."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from hires.plan.event import Event
from hires.plan.proof.stuck import Coming, Waiter
from hires.plan.proof.walk import Walk, extra, not_received, not_sent, spoken

Direction = tuple[str, int, int, int]
"""(``send`` or ``recv``, source, target, communicator)."""

OTHER = {"send": "recv", "recv": "send"}


@dataclass
class Unit:
    """The part of a group call that concerns one peer: it begins and ends as a whole."""

    posts: list[Event]
    num_open: int
    """Posts that have not met their other side."""


class Streams(Walk):
    """Each rank has a stream for each peer: the two share one communicator."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.streams: dict[Waiter, deque[Unit]] = {}  # the first unit runs
        self.running: dict[Direction, deque[Event]] = {}  # begun, not met yet

    def post(self, rank: int, event: Event) -> int:
        """Puts a group call on its streams."""
        units: dict[Waiter, list[Event]] = {}
        call = self._call(rank, event)
        for post in call:
            units.setdefault(Waiter(rank, post.peer, self.lane(post, post.kind)), []).append(post)
            if post.kind == "send":
                self.open_send((rank, post.peer, post.tag), post)
        for key, posts in units.items():
            stream = self.streams.setdefault(key, deque())
            stream.append(Unit(posts, len(posts)))
            if len(stream) == 1:
                self._begin(key)
        return len(call)

    def communicator(self, event: Event) -> int:
        """Returns which of the communicators of two ranks carries a message."""
        return 0

    def lane(self, event: Event, kind: str) -> int:
        """Returns on which of a rank's streams for a peer the send or receive of a message runs."""
        return 0

    def _direction(self, post: Event, rank: int) -> Direction:
        """Returns what meets what: posts of opposite kinds that are equal in the rest."""
        source, target = (rank, post.peer) if post.kind == "send" else (post.peer, rank)
        return post.kind, source, target, self.communicator(post)

    def _call(self, rank: int, event: Event) -> list[Event]:
        """Returns the posts of one group call, from its first."""
        program, first = self.programs[rank], self.at[rank]
        end = first + 1
        while event.call and end < len(program) and program[end].call == event.call:
            end += 1
        return program[first:end]

    def _begin(self, first: Waiter) -> None:
        """Begins the first unit of a stream, and every one that can begin because of that."""
        begun = deque([first])
        while begun:
            here = begun.popleft()
            for post in self.streams[here][0].posts:
                kind, source, target, communicator = way = self._direction(post, here.rank)
                opposite = self.running.get((OTHER[kind], source, target, communicator))
                if not opposite:
                    self.running.setdefault(way, deque()).append(post)
                    continue
                other = opposite.popleft()
                send, receive = (post, other) if post.kind == "send" else (other, post)
                self.match(source, target, send, receive)
                begun.extend(side for side in (here, self._facing(here, post)) if self._met(side))

    def _facing(self, stream: Waiter, post: Event) -> Waiter:
        """Returns the stream on which the other side of a post runs."""
        return Waiter(post.peer, stream.rank, self.lane(post, OTHER[post.kind]))

    def _met(self, key: Waiter) -> bool:
        """Counts one post of the running unit as met; returns whether the next unit begins."""
        stream = self.streams[key]
        unit = stream[0]
        unit.num_open -= 1
        if unit.num_open:
            return False
        for post in unit.posts:
            if post.kind == "send":
                self.end_send((key.rank, post.peer, post.tag))
            else:
                self.deliver(post.peer, key.rank, post)
        stream.popleft()
        return bool(stream)

    def expects(self, rank: int, event: Event) -> bool:
        """Whether a rank has posted a receive of the message that an event waits for."""
        stream = self.streams.get(Waiter(rank, event.peer, self.lane(event, "recv")), ())
        posted = (post for unit in stream for post in unit.posts)
        return any((post.kind, post.tag) == ("recv", event.tag) for post in posted)

    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns what a rank, or the running unit of a stream, waits for."""
        if waiter.peer is not None:
            posts = self._open_posts(waiter)
            return [one for post in posts for one in self._owner(post, waiter, coming)]
        event = self.next_of(waiter.rank)
        assert event is not None
        if event.kind == "wait_recv":
            return [Waiter(waiter.rank, event.peer, self.lane(event, "recv"))]
        sends = (self.open_sends[waiter.rank][c][0] for c in self.unmet(waiter.rank, event))
        return [Waiter(waiter.rank, post.peer, self.lane(post, "send")) for post in sends]

    def _owner(self, post: Event, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns who holds back the other side of a post: a stream, or a rank before posting."""
        facing, kind = self._facing(waiter, post), OTHER[post.kind]
        behind = itertools.islice(self.streams.get(facing, ()), 1, None)
        if any(other.kind == kind for unit in behind for other in unit.posts):
            return [facing]
        return [Waiter(facing.rank)] if coming.has(kind, facing.rank, waiter.rank) else []

    def _open_posts(self, waiter: Waiter) -> list[Event]:
        """Returns the posts of the running unit of a stream that have not met their other side."""
        open_posts = []
        for post in self.streams[waiter][0].posts:
            running = self.running.get(self._direction(post, waiter.rank), ())
            if any(post is other for other in running):
                open_posts.append(post)
        return open_posts

    def sentence(self, waiter: Waiter) -> str:
        """Says what a stream waits for."""
        post = self._open_posts(waiter)[0]
        verb, way = ("send", "to") if post.kind == "send" else ("receive", "from")
        return (
            f"the stream of rank {waiter.rank} must first {verb} {spoken(post)} {way} rank "
            f"{waiter.peer}"
        )

    def one_sided(self, coming: Coming) -> list[str]:
        """Returns the messages that one side posts more often than the other."""
        left: dict[Direction, list[Event]] = {}
        for key, stream in self.streams.items():
            behind = [post for unit in itertools.islice(stream, 1, None) for post in unit.posts]
            for post in [*(self._open_posts(key) if stream else ()), *behind]:
                left.setdefault(self._direction(post, key.rank), []).append(post)
        found = []
        for source, target, number in dict.fromkeys(way[1:] for way in left):
            sends = left.get(("send", source, target, number), [])
            sends = sends + self._coming(coming.posts("send", source, target), number)
            receives = left.get(("recv", source, target, number), [])
            receives = receives + self._coming(coming.posts("recv", target, source), number)
            if len(sends) > len(receives):
                found.append(not_received(source, target, extra(sends, receives)))
            if len(receives) > len(sends):
                found.append(not_sent(source, target, extra(receives, sends)))
        return found

    def _coming(self, posts: list[Event], communicator: int) -> list[Event]:
        """Returns those of some posts that a communicator will carry."""
        return [post for post in posts if self.communicator(post) == communicator]


class SeparateStreams(Streams):
    """Each rank has many streams for each peer: one for each kind of message, each way."""

    def communicator(self, event: Event) -> int:
        """Returns which of the communicators of two ranks carries a message."""
        return event.lane

    def lane(self, event: Event, kind: str) -> int:
        """Returns on which of a rank's streams for a peer the send or receive of a message runs."""
        return 1 + 2 * event.lane + (kind == "recv")
