"""Runs programs of messages on an abstract machine, which decides whether they end.

No receive is a wildcard and no rank looks at a clock, so the machine has one outcome, and one pass
over the programs decides. What a post and a wait mean follows from the route of the message:

* ``gloo``, ``mpi`` and ``shm`` buffer nothing here: a send ends when its receive is posted.
  Messages with one tag between two ranks keep their order, others pass each other.
* ``shm:mailbox`` writes into one of a few places between two tiles, and its sender waits only
  where all are full (:class:`AbstractMachine` draws it).
* ``nccl`` has a stream for each communicator (``hires.plan.channels``): one for the halos of a
  stage, one for each way between two stages, in each direction of the pipeline. A post holds up
  those behind it, and what a rank posts there in one call is one unit.
  ``hires.comm.backends.group_calls`` makes exactly these communicators and group calls.

Backends do not see each other: a tag means a message within one backend, and the collectives of a
group have one order for each backend that carries some of them.

A collective begins when all members have come to it, and a rank does not go on before it is done:
the worst case for nccl too, where only the device would wait. Also assumed of nccl: communicators
exist before the first step, their kernels run side by side, and nothing is buffered.
More waiting can add deadlocks, never hide one.

Source:
    NCCL user guide, "Point-to-point communication" (calls within a group progress independently,
    the group blocks until all are complete) and "Group calls".
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import ALONE, JOINT, MEETINGS, POSTS, WORLD, Event
from hires.plan.routes import MAILBOX, STREAMED

OF_SEVERAL = -1
"""In place of the peer of a stream: it has messages for several."""
Channel = tuple[int, int, Hashable]
"""(source, target, tag), or (source, target, lane) where lanes are mailboxes."""
Meeting = tuple[Hashable, int]
"""(communicator, number): the collectives of a group, counted as each member comes to them."""

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
    """None: the rank itself; -1: the stream is for several."""
    stream: Hashable = None
    """Which of its streams for this peer."""


@dataclass
class Unit:
    """The posts of one call on one stream: they begin and end together."""

    posts: list[Event]
    open: list[Event]
    """Posts that have not met their other side."""


class AbstractMachine:
    """All ranks' positions in their programs, and the messages between them.

    The first unit of a stream runs. It ends when both sides of all its posts run. Without streams
    each tag has one of its own each way, so a post holds up none but those of its tag:

        rank 0    [send a, tag 1]  [send b, tag 1]    a meets a, then b meets b
                  [send c, tag 2]                     waits, and holds up nothing
        rank 1    [recv a, tag 1]  [recv b, tag 1]

        rank 0, channel 3    [send a]  [send b, send c]     a meets a; then b and c meet, and both
        rank 1, channel 3    [recv a]  [recv b]  [recv c]   sends end together

    A tile has a mailbox for each other one, direction of the pipeline by direction:

        sender    write 1   write 2   (write 3 waits until 1 is read)
        mailbox  [1 . ]    [1 2]     [3 2]
        reader                        read 1      in the order of writing, whatever the tag

    The collectives of a group meet in the order in which each member comes to them. A member that
    has issued a sum goes on, so it may be several meetings ahead of the others:

        rank 0   issue a   issue b   wait a ...      meeting 0: both have come, complete
        rank 1   issue a   (computes)                meeting 1: rank 1 is absent
    """

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
        # By (source, target, lane): messages in a mailbox that are not yet read, and receives that
        # were posted and not waited for. The first meets the first.
        self.written: dict[Channel, deque[Event]] = defaultdict(deque)
        self.expected: dict[Channel, deque[Event]] = defaultdict(deque)
        self.num_open = 0  # posts that have not met their other side
        self.meeting: dict[Meeting, dict[int, Event]] = {}
        # By (rank, communicator): meetings it came to.
        self.calls: Counter[tuple[int, Hashable]] = Counter()
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

    @functools.cached_property
    def _backends(self) -> dict[Hashable, set[str]]:
        found: dict[Hashable, set[str]] = defaultdict(set)
        for event in chain.from_iterable(self.programs):
            found[_likeness(event)].add(event.backend)
        return found

    def way(self, event: Event) -> Hashable:
        """Returns what messages between two ranks share that keep their order."""
        if is_mail(event):
            return "mail", event.lane
        if on_stream(event):
            return event.backend, ("channel", event.channel) if event.channel else event.lane
        return self.tag_of(event)

    def tag_of(self, event: Event) -> Hashable:
        """Returns what a wait names its message by: the tag within its backend."""
        return event.backend, event.tag

    def communicator(self, event: Event) -> Hashable:
        """Returns what the collectives of a group share that have one order."""
        return event.peer, event.backend

    def words(self, event: Event) -> str:
        """Returns the words of an event, with its backend where another one carries the like."""
        several = len(self._backends[_likeness(event)]) > 1
        return f"{event.words} through {event.backend}" if several else event.words

    def stream_of(self, rank: int, peer: int, event: Event, kind: str) -> Waiter:
        """Returns the stream of a communicator, or of one tag each way."""
        if on_stream(event):
            if event.channel:
                return Waiter(rank, OF_SEVERAL, (event.backend, event.channel))
            kind = event.backend
        return Waiter(rank, peer, (kind, self.way(event)))

    def post(self, rank: int, event: Event) -> int:
        """Puts a send or receive, or its whole call, on its streams.

        Returns how many events of the rank that takes; 0 where the rank cannot go on yet.
        """
        if is_mail(event):
            return self._mail(rank, event)
        program, first = self.programs[rank], self.at[rank]
        end = first + 1
        while event.call and on_stream(event) and program[end : end + 1]:
            if (program[end].call, program[end].backend) != (event.call, event.backend):
                break
            end += 1
        units: dict[Waiter, list[Event]] = {}
        for post in program[first:end]:
            units.setdefault(self.stream_of(rank, post.peer, post, post.kind), []).append(post)
            if post.kind == "send":
                channel = rank, post.peer, self.tag_of(post)
                self.open_sends[rank].setdefault(channel, deque()).append(post)
        for stream, posts in units.items():
            self.streams[stream].append(Unit(posts, [*posts]))
            if len(self.streams[stream]) == 1:
                self._begin(stream)
        return end - first

    def _mail(self, rank: int, event: Event) -> int:
        """Writes a message where there is room, or expects one."""
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

    def end_send(self, channel: Channel) -> None:
        """Ends the oldest send of a channel; its rank may wait for it."""
        sends = self.open_sends[channel[0]]
        sends[channel].popleft()
        if not sends[channel]:
            del sends[channel]
        self.ready.append(channel[0])

    def take(self, rank: int, event: Event) -> bool:
        """Takes the message that a rank waits for; returns whether it was there.

        A mailbox is read in the order of writing: another message than the next stops the rank.
        """
        if not is_mail(event):
            arrived = self.arrived[event.peer, rank, self.tag_of(event)]
            return bool(arrived and arrived.popleft())
        box, mails = (event.peer, rank, event.lane), (event.peer, rank, ("mail", event.tag))
        if rank in self.halted or not self.arrived[mails]:
            return False
        first = self.expected[box][0]
        if first.tag != event.tag:
            self.halted.add(rank)
            self.proof.problems.append(
                f"rank {rank} waits for {event.words} from rank {event.peer} before {first.words}, "
                f"which lies first in its mailbox"
            )
            return False
        for queue in (self.written[box], self.expected[box], self.arrived[mails]):
            queue.popleft()
        self.ready.append(event.peer)
        return True

    def match(self, source: int, target: int, send: Event, receive: Event) -> None:
        """Counts a message whose sides have met, and compares what both say of it."""
        self.proof.num_messages += 1
        self.num_open -= 2
        if send[2:6] != receive[2:6] or send.route != receive.route:
            self.proof.problems.append(
                f"rank {source} sends {send.words} as {list(send.shape)} {send.dtype}"
                f"{_by(send, receive)} where rank {target} expects {receive.words} as "
                f"{list(receive.shape)} {receive.dtype}{_by(receive, send)}"
            )

    def unmet(self, rank: int, event: Event) -> list[Event]:
        """Returns the sends that an event waits for, the oldest of each channel."""
        channel = rank, event.peer, self.tag_of(event)
        sends = self.open_sends[rank].items()
        return [posts[0] for key, posts in sends if event.kind == "wait_sends" or key == channel]

    def absent(self, rank: int, event: Event) -> list[int]:
        """Returns the members of a group that have not come to what holds a rank up.

        That is a collective, or the oldest sum that it issued; none if it has issued no such sum.
        """
        meeting = self._next_meeting(rank, event)
        if event.kind == "wait_issued":
            begun = self.issued[rank, event.peer, event.tag]
            if not begun:
                return []
            meeting = begun[0]
        present = self.meeting.get(meeting, {})
        return [member for member in self.members[event.peer] if member not in present]

    def _next_meeting(self, rank: int, event: Event) -> Meeting:
        communicator = self.communicator(event)
        return communicator, self.calls[rank, communicator]

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
                self.end_send((rank, post.peer, self.tag_of(post)))
            else:
                self.arrived[post.peer, rank, self.tag_of(post)].append(post)
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
        meeting = self._next_meeting(rank, event)
        present = self.meeting.setdefault(meeting, {})
        present[rank] = event
        if event.kind == "issue":
            self.calls[rank, meeting[0]] += 1
            self.issued[rank, event.peer, event.tag].append(meeting)
            self.at[rank] += 1
        if len(present) < len(members):
            return event.kind == "issue"
        del self.meeting[meeting]
        first_rank, first = next(iter(present.items()))
        for member, own in present.items():
            if own != first:
                self.proof.problems.append(
                    f"rank {first_rank} calls {first.words} {list(first.shape)}{_by(first, own)} "
                    f"where rank {member} of the same group calls {own.words} {list(own.shape)}"
                    f"{_by(own, first)}"
                )
            if own.kind != "issue":
                self.calls[member, meeting[0]] += 1
                self.at[member] += 1
        self.proof.num_collectives += event.kind in JOINT
        self.ready.extend(member for member in present if member != rank)
        return True


def is_mail(event: Event) -> bool:
    """Whether a message goes through a mailbox."""
    return event.route is not None and event.route.algorithm == MAILBOX


def on_stream(event: Event) -> bool:
    """Whether a message has a place on a stream, on which it holds up others."""
    return event.backend in STREAMED


def _likeness(event: Event) -> Hashable:
    # A message and its waits, or all that a group does.
    of_message = event.kind.endswith(("send", "recv", "sends"))
    return (event.tag, event.what) if of_message else event.peer


def _by(event: Event, other: Event) -> str:
    return f" by {event.route}" if event.route != other.route else ""
