"""Runs programs of messages on an abstract machine, which decides whether they end.

No receive is a wildcard and no rank looks at a clock, so the machine has one outcome, and one pass
over the programs decides. The semantics say what begins when:

* ``rendezvous`` (gloo, mpi): the least possible buffering. A send ends when its receive is posted;
  messages with one tag between two ranks keep their order, others pass each other. A posted
  operation holds up nothing but its own wait.
* ``mailboxes`` (gloo on one machine): the same, but halos that are not too large go through memory
  (``Event.mail``). Such a send needs no receive, and holds its rank up while two older ones to the
  same tile lie unread. They are read where they are waited for, in the order of sending, whatever
  their tag: another order ends the run. Which of them go there depends on their size, so the
  machine decides as the transport does: ways that are safe alone could block each other.
* ``pair streams`` (nccl, one communicator for every two ranks): each rank has one stream for each
  peer, and what is posted there runs in the order of posting. A send or receive occupies the stream
  until both sides run it, so what is posted behind it cannot begin. There are no tags: the first
  send that runs meets the first receive that runs. Sends and receives of one group call progress
  together, and the stream is free when all of them are done; a call that concerns several peers is
  one unit on each of their streams. A wait ends when the unit of its operation is done.
* ``separate streams`` (nccl, several communicators for every two ranks): the same, but messages of
  different kinds do not stand in each other's way: halos and what travels between stages, in either
  direction of the pipeline (``Event.lane``), and the two ways between the ranks.

Pair streams need an order of posting on which both sides agree, and a pipeline has none that comes
by itself. A receive posted ahead stands before the send that the other side needs first. Receives
that share a call with the sends before them (``program.JOINED``) block each other where a value
skips a stage under 1f1b. Two directions of tiles send halos and stages' values between the same
ranks, in orders that differ. On separate streams the order of a plan's sends is that of its
receives, so posting ahead is as safe as under ``rendezvous``: that is what a backend of this kind
has to use.

Everywhere, a collective begins when all members have come to it, and a rank does not go on before
it is done: what the engine does next needs its result. That is the worst case for nccl too, where
only the device would wait; more waiting can add deadlocks, never hide one.

What is assumed of nccl: all communicators exist before the first step (making one waits for the
other side); kernels of different communicators run side by side on one device; and nothing is
buffered, although small messages may be, which again is the worst case.

Source:
    NCCL user guide, "Point-to-point communication" (calls within a group progress independently,
    the group blocks until all are complete) and "Group calls".
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import Event
from hires.plan.proof.explain import explain
from hires.plan.proof.walk import (
    Channel,
    Coming,
    Proof,
    Waiter,
    Walk,
    extra,
    not_received,
    not_sent,
    spoken,
)

RENDEZVOUS, MAILBOXES = "rendezvous", "mailboxes"
STREAMS, SEPARATE = "pair streams", "separate streams"


class Rendezvous(Walk):
    """Messages with one tag between two ranks meet in order; others pass each other."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.sends: dict[Channel, deque[Event]] = {}  # posted, without a receive
        self.receives: dict[Channel, deque[Event]] = {}  # posted, without a send

    def post(self, rank: int, event: Event) -> int:
        """Posts a send or receive, and matches it if the other side is posted."""
        sending = event.kind == "send"
        channel = (rank, event.peer, event.tag) if sending else (event.peer, rank, event.tag)
        here, there = (self.sends, self.receives) if sending else (self.receives, self.sends)
        if sending:
            self.open_send(channel, event)
        if not there.get(channel):
            here.setdefault(channel, deque()).append(event)
            return 1
        other = there[channel].popleft()
        send, receive = (event, other) if sending else (other, event)
        source, target, _ = channel
        self.match(source, target, send, receive)
        self.deliver(source, target, receive)
        self.end_send(channel)
        return 1

    def expects(self, rank: int, event: Event) -> bool:
        """Whether a rank has posted a receive of the message that an event waits for."""
        return bool(self.receives.get((event.peer, rank, event.tag)))

    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns the stuck ranks that would come to what a rank waits for, if they went on."""
        rank = waiter.rank
        event = self.next_of(rank)
        assert event is not None
        if event.kind == "wait_recv":
            others = [event.peer] if coming.has("send", event.peer, rank, event.tag) else []
        else:
            others = [
                target
                for _, target, tag in self.unmet(rank, event)
                if coming.has("recv", target, rank, tag)
            ]
        return [Waiter(other) for other in others]

    def one_sided(self, coming: Coming) -> list[str]:
        """Returns the messages whose other side does not come at all."""
        found = []
        for (source, target, tag), left in self.sends.items():
            if left and not coming.has("recv", target, source, tag):
                found.append(not_received(source, target, left[0]))
        for (source, target, tag), left in self.receives.items():
            if left and not coming.has("send", source, target, tag):
                found.append(not_sent(source, target, left[0]))
        return found


@dataclass
class Box:
    """The messages from one tile to another that nobody has read; the first meets the first."""

    written: deque[Event] = field(default_factory=deque)
    expected: deque[Event] = field(default_factory=deque)
    """Receives that were posted and not waited for."""

    @property
    def num_met(self) -> int:
        """Messages that are written and expected."""
        return min(len(self.written), len(self.expected))

    def place(self, tag: int) -> int | None:
        """Returns which message from now a receive will read; None if it was not posted."""
        return next((i for i, event in enumerate(self.expected) if event.tag == tag), None)


class Mailboxes(Rendezvous):
    """Each tile has a mailbox for each other one, direction of the pipeline by direction."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.boxes: dict[tuple[int, int, int], Box] = {}  # by (source, target, lane)
        self.halted: set[int] = set()

    def post(self, rank: int, event: Event) -> int:
        """Writes a message where there is room, or expects one."""
        if not event.mail:
            return super().post(rank, event)
        sending = event.kind == "send"
        source, target = (rank, event.peer) if sending else (event.peer, rank)
        box = self.boxes.setdefault((source, target, event.lane), Box())
        if sending and len(box.written) == SLOTS:
            return 0
        here = box.written if sending else box.expected
        here.append(event)
        if len(here) <= box.num_met:
            self.match(source, target, box.written[len(here) - 1], box.expected[len(here) - 1])
            self.ready.append(target)
        return 1

    def take(self, rank: int, event: Event) -> bool:
        """Reads the message that a rank waits for; one that is not the next stops the rank."""
        if not event.mail:
            return super().take(rank, event)
        box = self._box(rank, event)
        place = box.place(event.tag)
        if place is None or place >= len(box.written) or rank in self.halted:
            return False
        if place:
            self.halted.add(rank)
            self.proof.problems.append(
                f"rank {rank} waits for {spoken(event)} from rank {event.peer} before "
                f"{spoken(box.expected[0])}, which lies first in its mailbox"
            )
            return False
        box.written.popleft()
        box.expected.popleft()
        self.ready.append(event.peer)
        return True

    def unused(self) -> Iterator[tuple[int, int, Event]]:
        """Yields messages that were received and never read, too."""
        yield from super().unused()
        for (source, target, _), box in self.boxes.items():
            for index in range(box.num_met):
                yield source, target, box.expected[index]

    def expects(self, rank: int, event: Event) -> bool:
        """Whether a rank has posted a receive of the message that an event waits for."""
        if not event.mail:
            return super().expects(rank, event)
        return self._box(rank, event).place(event.tag) is not None

    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns the rank that would write or read what a rank waits for, if it went on."""
        event = self.next_of(waiter.rank)
        assert event is not None
        if not event.mail or event.kind == "wait_send":
            return super().blockers(waiter, coming)
        if waiter.rank in self.halted:
            return []
        kind = "wait_recv" if event.kind == "send" else "send"
        comes = _coming(coming, kind, event.peer, waiter.rank, event.lane)
        return [Waiter(event.peer)] if comes else []

    def one_sided(self, coming: Coming) -> list[str]:
        """Returns the messages that one side posts more often than the other."""
        found = super().one_sided(coming)
        for (source, target, lane), box in self.boxes.items():
            if not (box.written or box.expected):
                continue
            sends = [*box.written, *_coming(coming, "send", source, target, lane)]
            receives = [*box.expected, *_coming(coming, "recv", target, source, lane)]
            if len(sends) > len(receives):
                found.append(not_received(source, target, extra(sends, receives)))
            if len(receives) > len(sends):
                found.append(not_sent(source, target, extra(receives, sends)))
        return found

    def _box(self, rank: int, event: Event) -> Box:
        """Returns the mailbox in which a rank waits for a message."""
        return self.boxes.setdefault((event.peer, rank, event.lane), Box())


def _coming(coming: Coming, kind: str, rank: int, peer: int, lane: int) -> list[Event]:
    """Returns what a stuck rank would still do with a mailbox."""
    events = coming.posts(kind, rank, peer)
    return [event for event in events if event.mail and event.lane == lane]


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


MACHINES: dict[str, type[Walk]] = {
    RENDEZVOUS: Rendezvous,
    MAILBOXES: Mailboxes,
    STREAMS: Streams,
    SEPARATE: SeparateStreams,
}
"""By the name of the semantics."""


def run_machine(
    programs: list[list[Event]], members: list[list[int]], semantics: str = RENDEZVOUS
) -> Proof:
    """Runs one list of events per rank; takes time in proportion to their number.

    Args:
        programs: what each rank does, in order.
        members: the ranks of each group.
        semantics: ``RENDEZVOUS``, ``MAILBOXES``, ``STREAMS`` or ``SEPARATE``.

    Returns:
        The proof; ``problems`` is empty if every rank reaches its end with every message received,
        else it names the mismatches, or the ranks that wait for each other.
    """
    machine = MACHINES[semantics](programs, members)
    machine.run()
    machine.proof.problems += explain(machine)
    return machine.proof
