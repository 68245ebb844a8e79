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
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import Event
from hires.plan.proof.explain import explain
from hires.plan.proof.walk import Channel, Coming, Proof, Waiter, Walk, spoken

RENDEZVOUS, MAILBOXES = "rendezvous", "mailboxes"
STREAMS, SEPARATE = "pair streams", "separate streams"

Direction = tuple[str, int, int, Hashable]
"""(``send`` or ``recv``, source, target, way)."""

OTHER = {"send": "recv", "recv": "send"}


class Rendezvous(Walk):
    """Messages with one tag between two ranks meet in order; others pass each other."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.sends: dict[Channel, deque[Event]] = {}  # posted, without a receive
        self.receives: dict[Channel, deque[Event]] = {}  # posted, without a send

    def way(self, event: Event) -> Hashable:
        """Returns the tag."""
        return event.tag

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

    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns the stuck ranks that would come to what a rank waits for, if they went on."""
        rank = waiter.rank
        event = self.next_of(rank)
        assert event is not None
        if event.kind == "wait_recv":
            comes = coming.has("send", event.peer, rank, event.tag)
            return [Waiter(event.peer)] if comes else []
        unmet = self.unmet(rank, event)
        return [Waiter(other) for _, other, tag in unmet if coming.has("recv", other, rank, tag)]


@dataclass
class Mailbox:
    """The messages from one tile to another that nobody has read; the first meets the first."""

    written: deque[Event] = field(default_factory=deque)
    expected: deque[Event] = field(default_factory=deque)
    """Receives that were posted and not waited for."""

    @property
    def num_met(self) -> int:
        """Messages that are written and expected."""
        return min(len(self.written), len(self.expected))


class Mailboxes(Rendezvous):
    """Each tile has a mailbox for each other one, direction of the pipeline by direction.

    ``hires.comm.shared`` does this between the tiles of a stage, two slots for each other tile:

        sender    write 1   write 2   (write 3 waits until 1 is read)
        mailbox  [1 . ]    [1 2]     [3 2]
        reader                        read 1      in the order of writing, whatever the tag

    Messages that do not go through memory meet as over the network, so that each kind can hold up
    the other.
    """

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.boxes: dict[tuple[int, int, int], Mailbox] = {}  # by (source, target, lane)
        self.halted: set[int] = set()

    def way(self, event: Event) -> Hashable:
        """Returns the mailbox, or the tag of what goes over the network."""
        return ("mail", event.lane) if event.mail else event.tag

    def post(self, rank: int, event: Event) -> int:
        """Writes a message where there is room, or expects one."""
        if not event.mail:
            return super().post(rank, event)
        sending = event.kind == "send"
        source, target = (rank, event.peer) if sending else (event.peer, rank)
        box = self.boxes.setdefault((source, target, event.lane), Mailbox())
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
        box = self.boxes.setdefault((event.peer, rank, event.lane), Mailbox())
        tags = [receive.tag for receive in box.expected][: len(box.written)]
        if event.tag not in tags or rank in self.halted:
            return False
        if tags[0] != event.tag:
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
            for receive in itertools.islice(box.expected, box.num_met):
                yield source, target, receive

    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns the rank that would write or read what a rank waits for, if it went on."""
        event = self.next_of(waiter.rank)
        assert event is not None
        if not event.mail or event.kind == "wait_send":
            return super().blockers(waiter, coming)
        kind = "wait_recv" if event.kind == "send" else "send"
        others = coming.events(kind, event.peer, waiter.rank)
        comes = any(self.way(other) == self.way(event) for other in others)
        return [Waiter(event.peer)] if comes and waiter.rank not in self.halted else []


@dataclass
class Unit:
    """The part of a group call that concerns one peer: it begins and ends as a whole."""

    posts: list[Event]
    num_open: int
    """Posts that have not met their other side."""


class Streams(Walk):
    """Each rank has a stream for each peer: the two share one communicator.

    The first unit of a stream runs. It ends when both sides of all its posts run:

        rank 0, peer 1    [send a]  [recv b]         a meets a: both streams go on,
        rank 1, peer 0    [recv a]  [send b]         then b meets b
        rank 1, peer 0    [send b]  [recv a]         neither first unit meets its other side
    """

    apart = False
    """Whether messages of different lanes and both ways between two ranks have their own stream."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.streams: dict[Waiter, deque[Unit]] = {}  # the first unit runs
        self.running: dict[Direction, deque[Event]] = {}  # begun, not met yet

    def way(self, event: Event) -> Hashable:
        """Returns which of the communicators of two ranks carries a message."""
        return event.lane if self.apart else 0

    def post(self, rank: int, event: Event) -> int:
        """Puts a group call, from its first event on, on its streams."""
        program, first = self.programs[rank], self.at[rank]
        end = first + 1
        while event.call and end < len(program) and program[end].call == event.call:
            end += 1
        units: dict[Waiter, list[Event]] = {}
        for post in program[first:end]:
            units.setdefault(self._stream(rank, post.peer, post, post.kind), []).append(post)
            if post.kind == "send":
                self.open_send((rank, post.peer, post.tag), post)
        for key, posts in units.items():
            stream = self.streams.setdefault(key, deque())
            stream.append(Unit(posts, len(posts)))
            if len(stream) == 1:
                self._begin(key)
        return end - first

    def _stream(self, rank: int, peer: int, event: Event, kind: str) -> Waiter:
        """Returns on which of a rank's streams for a peer the send or receive of a message runs."""
        return Waiter(rank, peer, 1 + 2 * event.lane + (kind == "recv") if self.apart else 0)

    def _direction(self, post: Event, rank: int) -> Direction:
        """Returns what meets what: posts of opposite kinds that are equal in the rest."""
        source, target = (rank, post.peer) if post.kind == "send" else (post.peer, rank)
        return post.kind, source, target, self.way(post)

    def _begin(self, first: Waiter) -> None:
        """Begins the first unit of a stream, and every one that can begin because of that."""
        begun = deque([first])
        while begun:
            here = begun.popleft()
            for post in self.streams[here][0].posts:
                kind, source, target, way = direction = self._direction(post, here.rank)
                opposite = self.running.get((OTHER[kind], source, target, way))
                if not opposite:
                    self.running.setdefault(direction, deque()).append(post)
                    continue
                other = opposite.popleft()
                send, receive = (post, other) if kind == "send" else (other, post)
                self.match(source, target, send, receive)
                facing = self._stream(post.peer, here.rank, post, OTHER[kind])
                begun.extend(side for side in (here, facing) if self._met(side))

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

    def _open_posts(self, waiter: Waiter) -> list[Event]:
        """Returns the posts of the running unit of a stream that have not met their other side."""
        return [
            post
            for post in self.streams[waiter][0].posts
            for running in [self.running.get(self._direction(post, waiter.rank), ())]
            if any(post is other for other in running)
        ]

    def blockers(self, waiter: Waiter, coming: Coming) -> list[Waiter]:
        """Returns what a rank, or the running unit of a stream, waits for."""
        rank = waiter.rank
        if waiter.peer is None:
            event = self.next_of(rank)
            assert event is not None
            if event.kind == "wait_recv":
                return [self._stream(rank, event.peer, event, "recv")]
            sends = (self.open_sends[rank][channel][0] for channel in self.unmet(rank, event))
            return [self._stream(rank, post.peer, post, "send") for post in sends]
        holders = []
        for post in self._open_posts(waiter):
            # The other side stands on its stream behind another unit, or was not posted yet.
            kind = OTHER[post.kind]
            facing = self._stream(post.peer, rank, post, kind)
            behind = itertools.islice(self.streams.get(facing, ()), 1, None)
            if any(other.kind == kind for unit in behind for other in unit.posts):
                holders.append(facing)
            elif coming.events(kind, facing.rank, rank):
                holders.append(Waiter(facing.rank))
        return holders

    def sentence(self, waiter: Waiter) -> str:
        """Describes what a stream waits for."""
        post = self._open_posts(waiter)[0]
        verb, way = ("send", "to") if post.kind == "send" else ("receive", "from")
        return (
            f"the stream of rank {waiter.rank} must first {verb} {spoken(post)} {way} rank "
            f"{waiter.peer}"
        )


class SeparateStreams(Streams):
    """Each rank has many streams for each peer: one for each kind of message, each way."""

    apart = True


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
