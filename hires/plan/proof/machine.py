"""Runs programs of messages on an abstract machine, which decides whether they end.

No receive is a wildcard and no rank looks at a clock, so the machine has one outcome, and one pass
over the programs decides. The semantics say what begins when:

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
* ``separate streams`` (nccl, several communicators for every two ranks): the same, but halos and
  what travels between stages, in either direction of the pipeline (``Event.lane``), and the two
  ways between the ranks do not stand in each other's way.

Pair streams need an order of posting on which both sides agree, and a pipeline has none. A receive
posted ahead stands before the send that the other side needs first; receives in one call with the
sends before them (``program.JOINED``) block each other where a value skips a stage under 1f1b. On
separate streams sends and receives have one order, so posting ahead is as safe as by rendezvous.

A collective begins when all members have come to it, and a rank does not go on before it is done:
the worst case for nccl too, where only the device would wait. Also assumed of nccl: communicators
exist before the first step, their kernels run side by side, and nothing is buffered.
More waiting can add deadlocks, never hide one.

Source:
    NCCL user guide, "Point-to-point communication" (calls within a group progress independently,
    the group blocks until all are complete) and "Group calls".
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import ALONE, MEETINGS, POSTS, Event

RENDEZVOUS, MAILBOXES = "rendezvous", "mailboxes"
STREAMS, SEPARATE = "pair streams", "separate streams"

Channel = tuple[int, int, int]
"""(source, target, tag), or (source, target, lane) where lanes are mailboxes."""
Meeting = tuple[int, int]
"""(group, number): the collectives of a group, counted as each member comes to them."""

WORLD = -1
"""The group of all ranks."""
OTHER = {"send": "recv", "recv": "send"}


@dataclass
class Proof:
    """What the abstract machine found."""

    num_messages: int = 0
    num_collectives: int = 0
    problems: list[str] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    """Ranks that never reach their end."""


class Waiter(NamedTuple):
    """A rank that cannot go on, or one of its streams for the messages with a peer."""

    rank: int
    peer: int | None = None
    """None: the rank itself."""
    stream: Hashable = None
    """Which of its streams for this peer."""


@dataclass
class Unit:
    """The posts of one call on one stream: they begin and end together."""

    posts: list[Event]
    open: list[Event]
    """Posts that have not met their other side."""


class Rendezvous:
    """All ranks' positions in their programs, and the messages between them.

    The first unit of a stream runs. It ends when both sides of all its posts run; here each tag has
    a stream of its own each way, so a post holds up none but those of its tag:

        rank 0    [send a, tag 1]  [send b, tag 1]    a meets a, then b meets b
                  [send c, tag 2]                     waits, and holds up nothing
        rank 1    [recv a, tag 1]  [recv b, tag 1]

    The collectives of a group meet in the order in which each member comes to them. A member that
    has issued a sum goes on, so it may be several meetings ahead of the others:

        rank 0   issue a   issue b   wait a ...      meeting 0: both have come, complete
        rank 1   issue a   (computes)                meeting 1: rank 1 is absent
    """

    grouped = False
    """Whether the posts of one call are one unit on each of their streams."""

    def __init__(self, programs: list[list[Event]], members: list[list[int]]) -> None:
        self.programs = programs
        self.members = dict(enumerate(dict.fromkeys(ranks) for ranks in members))
        self.members[WORLD] = dict.fromkeys(range(len(programs)))
        self.at = [0] * len(programs)
        self.ready = deque(range(len(programs)))
        self.streams: dict[Waiter, deque[Unit]] = defaultdict(deque)  # the first unit runs
        # By (source, target, tag): received and not waited for.
        self.arrived: dict[tuple[int, int, Hashable], deque[Event]] = defaultdict(deque)
        self.open_sends: list[dict[Channel, deque[Event]]] = [{} for _ in programs]
        self.num_open = 0  # posts that have not met their other side
        self.meeting: dict[Meeting, dict[int, Event]] = {}
        self.calls: Counter[tuple[int, int]] = Counter()  # by (rank, group): meetings it came to
        # By (rank, group, tag): meetings of sums that it has not waited for.
        self.issued: dict[tuple[int, int, int], deque[Meeting]] = defaultdict(deque)
        self.halted: set[int] = set()  # ranks that an error of their own stops
        self.proof = Proof()

    def run(self) -> None:
        """Advances every rank as far as it gets, waking those that wait for what happened."""
        while self.ready:
            rank = self.ready.popleft()
            while (event := self.next_of(rank)) is not None and self._step(rank, event):
                pass
        self.proof.stuck = [r for r in range(len(self.programs)) if self.next_of(r) is not None]

    def next_of(self, rank: int) -> Event | None:
        """Returns what a rank does next, or None at its end."""
        program, at = self.programs[rank], self.at[rank]
        return program[at] if at < len(program) else None

    def way(self, event: Event) -> Hashable:
        """Returns what messages between two ranks share that keep their order."""
        return event.tag

    def stream_of(self, rank: int, peer: int, event: Event, kind: str) -> Waiter:
        """Returns the stream on which a rank sends or receives the message of an event."""
        return Waiter(rank, peer, (kind, self.way(event)))

    def post(self, rank: int, event: Event) -> int:
        """Puts a send or receive, or its whole call, on its streams.

        Returns how many events of the rank that takes; 0 where the rank cannot go on yet.
        """
        program, first = self.programs[rank], self.at[rank]
        end = first + 1
        while self.grouped and event.call and program[end : end + 1]:
            if program[end].call != event.call:
                break
            end += 1
        units: dict[Waiter, list[Event]] = {}
        for post in program[first:end]:
            units.setdefault(self.stream_of(rank, post.peer, post, post.kind), []).append(post)
            if post.kind == "send":
                channel = rank, post.peer, post.tag
                self.open_sends[rank].setdefault(channel, deque()).append(post)
        for stream, posts in units.items():
            self.streams[stream].append(Unit(posts, [*posts]))
            if len(self.streams[stream]) == 1:
                self._begin(stream)
        return end - first

    def end_send(self, channel: Channel) -> None:
        """Ends the oldest send of a channel; its rank may wait for it."""
        sends = self.open_sends[channel[0]]
        sends[channel].popleft()
        if not sends[channel]:
            del sends[channel]
        self.ready.append(channel[0])

    def take(self, rank: int, event: Event) -> bool:
        """Takes the message that a rank waits for; returns whether it was there."""
        arrived = self.arrived[event.peer, rank, event.tag]
        return bool(arrived and arrived.popleft())

    def match(self, source: int, target: int, send: Event, receive: Event) -> None:
        """Counts a message whose sides have met, and compares what both say of it."""
        self.proof.num_messages += 1
        self.num_open -= 2
        if send[2:6] != receive[2:6]:
            self.proof.problems.append(
                f"rank {source} sends {send.words} as {list(send.shape)} {send.dtype} where rank "
                f"{target} expects {receive.words} as {list(receive.shape)} {receive.dtype}"
            )

    def unmet(self, rank: int, event: Event) -> list[Event]:
        """Returns the sends that an event waits for, the oldest of each channel."""
        channel = rank, event.peer, event.tag
        sends = self.open_sends[rank].items()
        return [posts[0] for key, posts in sends if event.kind == "wait_sends" or key == channel]

    def absent(self, rank: int, event: Event) -> list[int]:
        """Returns the members of a group that have not come to what holds a rank up.

        That is a collective, or the oldest sum that it issued; none if it has issued no such sum.
        """
        meeting = event.peer, self.calls[rank, event.peer]
        if event.kind == "wait_issued":
            begun = self.issued[rank, event.peer, event.tag]
            if not begun:
                return []
            meeting = begun[0]
        present = self.meeting.get(meeting, {})
        return [member for member in self.members[event.peer] if member not in present]

    def _begin(self, first: Waiter) -> None:
        """Begins the first unit of a stream, and every one that can begin because of that."""
        begun = deque([first])
        while begun:
            here = begun.popleft()
            if not self.streams[here]:
                continue  # it has ended, as others began
            rank, unit = here.rank, self.streams[here][0]
            for post in unit.posts:
                facing = self.stream_of(post.peer, rank, post, OTHER[post.kind])
                there = self.streams[facing][0].open if self.streams.get(facing) else []
                same = OTHER[post.kind], rank, self.way(post)
                other = next((o for o in there if (o.kind, o.peer, self.way(o)) == same), None)
                if other is None or post not in unit.open:
                    continue
                if post.kind == "send":
                    self.match(rank, post.peer, post, other)
                else:
                    self.match(post.peer, rank, other, post)
                unit.open.remove(post)
                there.remove(other)
                begun += [side for side in dict.fromkeys((here, facing)) if self._ended(side)]

    def _ended(self, key: Waiter) -> bool:
        """Ends a running unit if all its posts have met; returns whether the next one begins."""
        stream, rank = self.streams[key], key.rank
        if stream[0].open:
            return False
        for post in stream.popleft().posts:
            if post.kind == "send":
                self.end_send((rank, post.peer, post.tag))
            else:
                self.arrived[post.peer, rank, post.tag].append(post)
                self.ready.append(rank)
        return bool(stream)

    def _step(self, rank: int, event: Event) -> bool:
        """Executes one event; returns whether the rank may go on."""
        kind, steps = event.kind, 1
        if kind in MEETINGS or kind == "issue":
            return self._meet(rank, event)
        if kind in POSTS:
            steps = self.post(rank, event)
            self.num_open += steps
        elif kind == "wait_recv":
            steps = self.take(rank, event)
        elif kind == "wait_issued":
            begun = self.issued[rank, event.peer, event.tag]
            steps = len(begun) > 0 and begun[0] not in self.meeting
            if steps:
                begun.popleft()
        elif kind not in ALONE:
            steps = not self.unmet(rank, event)
        self.at[rank] += steps
        return bool(steps)

    def _meet(self, rank: int, event: Event) -> bool:
        """Brings a rank to a collective, which happens when all members have come.

        Returns whether the rank may go on: one that has only issued a sum need not wait.
        """
        members = self.members.get(event.peer, {})
        if rank not in members:
            text = f"rank {rank} is no member of the group {list(members)} of {event.words}"
            self.proof.problems.append(text)
            self.at[rank] += 1
            return True
        meeting = event.peer, self.calls[rank, event.peer]
        present = self.meeting.setdefault(meeting, {})
        present[rank] = event
        if event.kind == "issue":
            self.calls[rank, event.peer] += 1
            self.issued[rank, event.peer, event.tag].append(meeting)
            self.at[rank] += 1
        if len(present) < len(members):
            return event.kind == "issue"
        del self.meeting[meeting]
        first_rank, first = next(iter(present.items()))
        for member, own in present.items():
            if own != first:
                self.proof.problems.append(
                    f"rank {first_rank} calls {first.words} {list(first.shape)} where rank "
                    f"{member} of the same group calls {own.words} {list(own.shape)}"
                )
            if own.kind != "issue":
                self.calls[member, event.peer] += 1
                self.at[member] += 1
        self.proof.num_collectives += event.kind in ("collective", "issue")
        self.ready.extend(member for member in present if member != rank)
        return True


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
        # By (source, target, lane): messages that nobody has read, and receives that were posted
        # and not waited for. The first meets the first.
        self.written: dict[Channel, deque[Event]] = defaultdict(deque)
        self.expected: dict[Channel, deque[Event]] = defaultdict(deque)

    def way(self, event: Event) -> Hashable:
        """Returns the mailbox, or the tag of what goes over the network."""
        return ("mail", event.lane) if event.mail else event.tag

    def post(self, rank: int, event: Event) -> int:
        """Writes a message where there is room, or expects one."""
        if not event.mail:
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
        if not event.mail:
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
    """Each rank has a stream for each peer, kind of message and way: communicators of their own.

    A post holds up those behind it, whatever their tags:

        rank 0, peer 1    [send a]  [send b, send c]     a meets a; then b and c meet, and both
        rank 1, peer 0    [recv a]  [recv b]  [recv c]   sends end together
    """

    grouped = True

    def way(self, event: Event) -> Hashable:
        """Returns the communicator of two ranks that carries a message."""
        return event.lane


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


MACHINES: dict[str, type[Rendezvous]] = {
    RENDEZVOUS: Rendezvous,
    MAILBOXES: Mailboxes,
    SEPARATE: SeparateStreams,
    STREAMS: PairStreams,
}
"""By the name of the semantics."""
