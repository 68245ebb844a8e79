"""Defines what a post and a wait mean on each kind of transport: the semantics of messages.

* ``rendezvous`` (gloo, mpi): the least possible buffering. A send ends when its receive is posted;
  messages with one tag between two ranks keep their order, others pass each other.
* ``mailboxes`` (gloo on one machine): the same, but halos that are not too large go through memory
  (``Event.mail``). Which of them do depends on their size, so the machine decides as the transport
  does: ways that are safe alone could block each other.
* ``pair streams`` (nccl, one communicator for every two ranks): what a rank posts for a peer runs
  in the order of posting. A send or receive occupies the stream until both sides run it. There are
  no tags: the first send that runs meets the first receive that runs. Sends and receives of one
  group call progress together; a call that concerns several peers is one unit on each of their
  streams. A wait ends when the unit of its operation is done.
* ``separate streams`` (nccl as hires uses it): the same, but each communicator has a stream of its
  own (``hires.plan.channels``): one for the halos of a stage, one for each way between two stages,
  in each direction of the pipeline. What a rank posts there in one call is one unit, even if it
  concerns several peers.
* ``routes``: each message as the backend of its own route does it, and each backend has tags,
  streams and communicators of its own (:class:`Routes`). This is what runs.

Pair streams need an order of posting on which both sides agree, and a pipeline has none. A receive
posted ahead stands before the send that the other side needs first; receives in one call with the
sends before them (``program.JOINED``) block each other where a value skips a stage under 1f1b. On
separate streams sends and receives have one order, so posting ahead is as safe as by rendezvous.
``hires.comm.backends.group_calls`` makes exactly these communicators and group calls.

Source:
    NCCL user guide, "Point-to-point communication" (calls within a group progress independently,
    the group blocks until all are complete) and "Group calls".
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Hashable
from itertools import chain

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import Event
from hires.plan.proof.machine import Channel, Rendezvous, Waiter
from hires.plan.routes import MAILBOX, STREAMED

OF_SEVERAL = -1
"""In place of the peer of a stream: it has messages for several."""
RENDEZVOUS, MAILBOXES = "rendezvous", "mailboxes"
STREAMS, SEPARATE = "pair streams", "separate streams"
ROUTES = "routes"


class Mailboxes(Rendezvous):
    """Each tile has a mailbox for each other one, direction of the pipeline by direction.

    ``hires.comm.backends.shared`` does this between the tiles of a stage, two slots each way:

        sender    write 1   write 2   (write 3 waits until 1 is read)
        mailbox  [1 . ]    [1 2]     [3 2]
        reader                        read 1      in the order of writing, whatever the tag

    Messages that do not go through memory meet as over the network, so that each kind can hold up
    the other.
    """

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        super().__init__(programs, members)
        # By (source, target, lane): messages not yet read, and receives that were posted
        # and not waited for. The first meets the first.
        self.written: dict[Channel, deque[Event]] = defaultdict(deque)
        self.expected: dict[Channel, deque[Event]] = defaultdict(deque)

    def by_mail(self, event: Event) -> bool:
        """Whether a message goes through memory."""
        return event.mail

    def way(self, event: Event) -> Hashable:
        """Returns the mailbox, or the tag of what goes over the network."""
        return ("mail", event.lane) if self.by_mail(event) else event.tag

    def post(self, rank: int, event: Event) -> int:
        """Writes a message where there is room, or expects one."""
        if not self.by_mail(event):
            return super().post(rank, event)
        sending = event.kind == "send"
        source, target = (rank, event.peer) if sending else (event.peer, rank)
        box = source, target, event.lane
        if sending and len(self.written[box]) == SLOTS:
            return 0
        here, there = self.written[box], self.expected[box]
        if not sending:
            here, there = there, here
        here.append(event)
        if len(here) <= len(there):
            other = there[len(here) - 1]
            send, receive = (event, other) if sending else (other, event)
            self.match(source, target, send, receive)
            self.arrived[source, target, ("mail", receive.tag)].append(receive)
            self.ready.append(target)
        return 1

    def take(self, rank: int, event: Event) -> bool:
        """Reads the message that a rank waits for; one that is not the next stops the rank."""
        if not self.by_mail(event):
            return super().take(rank, event)
        box, arrived = (event.peer, rank, event.lane), (event.peer, rank, ("mail", event.tag))
        if rank in self.halted or not self.arrived[arrived]:
            return False
        first = self.expected[box][0]
        if first.tag != event.tag:
            self.halted.add(rank)
            self.proof.problems.append(
                f"rank {rank} waits for {event.words} from rank {event.peer} before {first.words}, "
                f"which lies first in its mailbox"
            )
            return False
        for queue in (self.written[box], self.expected[box], self.arrived[arrived]):
            queue.popleft()
        self.ready.append(event.peer)
        return True


class SeparateStreams(Rendezvous):
    """Each rank has a stream for each communicator that it is part of.

    A post holds up those behind it, whatever their tags:

        rank 0, channel 3    [send a]  [send b, send c]     a meets a; then b and c meet, and both
        rank 1, channel 3    [recv a]  [recv b]  [recv c]   sends end together

    The messages of two ranks that name no channel have one for each lane and way.
    """

    grouped = True

    def way(self, event: Event) -> Hashable:
        """Returns the communicator that carries a message."""
        return ("channel", event.channel) if event.channel else event.lane

    def stream_of(self, rank: int, peer: int, event: Event, kind: str) -> Waiter:
        """Returns the stream of a rank on the communicator of a message."""
        if event.channel:
            return Waiter(rank, OF_SEVERAL, event.channel)
        return super().stream_of(rank, peer, event, kind)


class PairStreams(SeparateStreams):
    """Each rank has one stream for each peer: the two share one communicator.

    rank 0, peer 1    [send a]  [recv b]         a meets a: both streams go on,
    rank 1, peer 0    [recv a]  [send b]         then b meets b
    rank 1, peer 0    [send b]  [recv a]         neither first unit meets its other side
    """

    def way(self, event: Event) -> Hashable:
        """Returns the same for all messages."""
        return 0

    def stream_of(self, rank: int, peer: int, event: Event, kind: str) -> Waiter:
        """Returns the stream of a rank for a peer."""
        return Waiter(rank, peer)


class Routes(Mailboxes, SeparateStreams):
    """Each message under the semantics of its own route.

    Backends do not see each other: a tag means a message within one backend, and the collectives
    of a group have one order for each backend that carries some of them.

        rank 0   all-reduce a (mpi)    all-reduce b (gloo)      a waits for rank 1 in mpi,
        rank 1   all-reduce b (gloo)   all-reduce a (mpi)       b for rank 0 in gloo: a deadlock

        rank 0   issue a (mpi)   all-reduce b (gloo)   wait a     both end: a sum that is under way
        rank 1   all-reduce b (gloo)   issue a (mpi)   wait a     holds up no other backend
    """

    @functools.cached_property
    def _backends(self) -> dict[Hashable, set[str]]:
        found: dict[Hashable, set[str]] = defaultdict(set)
        for event in chain.from_iterable(self.programs):
            found[_likeness(event)].add(event.backend)
        return found

    def words(self, event: Event) -> str:
        """Returns the words of an event, with its backend where another one carries the like."""
        several = len(self._backends[_likeness(event)]) > 1
        return f"{event.words} through {event.backend}" if several else event.words

    def by_mail(self, event: Event) -> bool:
        """Whether a message goes through a mailbox."""
        return event.route is not None and event.route.algorithm == MAILBOX

    def on_stream(self, event: Event) -> bool:
        """Whether its backend has streams."""
        return event.backend in STREAMED

    def way(self, event: Event) -> Hashable:
        """Returns the mailbox, the communicator, or the backend's tag of a message."""
        if self.by_mail(event):
            return Mailboxes.way(self, event)
        if self.on_stream(event):
            return event.backend, SeparateStreams.way(self, event)
        return event.backend, event.tag

    def tag_of(self, event: Event) -> Hashable:
        """Returns the tag of a message within its backend."""
        return event.backend, event.tag

    def communicator(self, event: Event) -> Hashable:
        """Returns the group within its backend."""
        return event.peer, event.backend

    def stream_of(self, rank: int, peer: int, event: Event, kind: str) -> Waiter:
        """Returns the stream of a communicator, or of one tag each way."""
        if self.on_stream(event):
            if event.channel:
                return Waiter(rank, OF_SEVERAL, (event.backend, event.channel))
            kind = event.backend
        return Waiter(rank, peer, (kind, self.way(event)))


def _likeness(event: Event) -> Hashable:
    # A message and its waits, or all that a group does.
    return (event.tag, event.what) if event.kind.endswith(_OF_MESSAGES) else event.peer


_OF_MESSAGES = ("send", "recv", "sends")


MACHINES: dict[str, type[Rendezvous]] = {
    RENDEZVOUS: Rendezvous,
    MAILBOXES: Mailboxes,
    SEPARATE: SeparateStreams,
    STREAMS: PairStreams,
    ROUTES: Routes,
}
"""By the name of the semantics."""
