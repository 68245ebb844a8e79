"""Programs of events executed for real: a thread for each rank, blocking on conditions.

It shares no code with the abstract machine, only the names of the semantics.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass, field

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import ALONE, Event
from hires.plan.proof.semantics import MAILBOXES, RENDEZVOUS, SEPARATE, STREAMS
from tests.helpers.threads import HARD_TIMEOUT_S, Threads

Programs = list[list[Event]]


@dataclass
class Outcome:
    """How an execution ended."""

    stuck: list[int] = field(default_factory=list)
    """Ranks that did not reach their end."""
    wrong: list[str] = field(default_factory=list)
    """Receives and collectives that met something else than they expected."""
    left: int = 0
    """Messages without another side, and received ones that nobody waited for."""

    @property
    def ok(self) -> bool:
        """Whether all went as it should."""
        return not (self.stuck or self.wrong or self.left)


@dataclass(eq=False)
class Post:
    """A send or receive under way."""

    event: Event
    rank: int
    met: bool = False
    done: bool = False

    @property
    def ends(self) -> tuple[int, int]:
        """Source and target."""
        other = self.event.peer
        return (self.rank, other) if self.event.kind == "send" else (other, self.rank)


class Execution(Threads):
    """Ranks with rendezvous messages: one mailbox for each (source, target, tag)."""

    def __init__(self, programs: Programs, members: list[list[int]]) -> None:
        super().__init__()
        self.programs = programs
        self.members = members
        self.boxes: dict[tuple[int, ...], deque[Post]] = defaultdict(deque)
        self.sends: list[list[Post]] = [[] for _ in programs]
        self.receives: list[dict[tuple[int, int], deque[Post]]] = [
            defaultdict(deque) for _ in programs
        ]
        self.meetings: dict[int, dict[int, Event]] = defaultdict(dict)
        self.sums: dict[tuple[int, int], dict[int, Event]] = defaultdict(dict)
        self.ended: set[int] = set()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Executes all programs."""
        with self.lock:
            for rank in range(len(self.programs)):
                self.start(lambda rank=rank: self.walk(rank))  # type: ignore[misc]
        for thread in self.threads:
            thread.join(HARD_TIMEOUT_S)
        assert not self.timed_out, "the threads lost a wake-up"
        self.outcome.stuck = [r for r in range(len(self.programs)) if r not in self.ended]
        self.outcome.left = sum(not post.done for posts in self.sends for post in posts) + sum(
            len(posts) for by_tag in self.receives for posts in by_tag.values()
        )
        return self.outcome

    def walk(self, rank: int) -> None:
        """Executes the program of a rank."""
        program, at = self.programs[rank], 0
        while at < len(program):
            event = program[at]
            call = called(program, at)
            if event.kind in ("send", "recv"):
                self.post([self.note(rank, post) for post in call])
            elif event.kind == "wait_recv":
                if not self.receive(rank, event):
                    return
            elif event.kind in ("wait_send", "wait_sends"):
                self.wait(lambda event=event: self.all_sent(rank, event))  # type: ignore[misc]
            elif event.kind == "issue":
                self.issue(rank, event)
            elif event.kind == "wait_issued":
                self.wait(lambda event=event: self.is_summed(rank, event))  # type: ignore[misc]
            elif event.kind in ALONE:
                pass
            else:
                self.meet(rank, event)
            at += len(call)
        self.ended.add(rank)

    def receive(self, rank: int, event: Event) -> bool:
        """Waits for a message; returns whether the rank may go on."""
        posted = self.receives[rank][event.peer, event.tag]
        self.wait(lambda: bool(posted) and posted[0].done)
        posted.popleft()
        return True

    def note(self, rank: int, event: Event) -> Post:
        """Keeps a post for those who wait for it."""
        post = Post(event, rank)
        if event.kind == "send":
            self.sends[rank].append(post)
        else:
            self.receives[rank][event.peer, event.tag].append(post)
        return post

    def all_sent(self, rank: int, event: Event) -> bool:
        """Whether the sends that an event waits for are done."""
        return all(
            post.done
            for post in self.sends[rank]
            if event.kind == "wait_sends"
            or (post.event.peer, post.event.tag) == (event.peer, event.tag)
        )

    def post(self, posts: list[Post]) -> None:
        """Begins a group call."""
        for post in posts:
            other = self.encounter(post, (*post.ends, post.event.tag))
            if other:
                post.done = other.done = True
        self.changed()

    def encounter(self, post: Post, address: tuple[int, ...]) -> Post | None:
        """Returns the other side of a post, which leaves its box; else the post waits there."""
        box = self.boxes[address]
        if not box or box[0].event.kind == post.event.kind:
            box.append(post)
            return None
        other = box.popleft()
        post.met = other.met = True
        self.compare(post, other)
        return other

    def compare(self, post: Post, other: Post) -> None:
        """Notes where both sides of a message say different things."""
        mine, theirs = ((e.tag, e.shape, e.dtype, e.what) for e in (post.event, other.event))
        if mine != theirs:
            self.outcome.wrong.append(f"{post.ends}: {mine} is not {theirs}")

    def meet(self, rank: int, event: Event) -> None:
        """Comes to a collective, and waits until all members have."""
        members = self.members[event.peer] if event.kind != "barrier" else range(len(self.programs))
        if rank not in members:
            self.outcome.wrong.append(f"{rank} is not in group {event.peer}")
            return
        present = self.meetings[event.peer]
        present[rank] = event
        if len(present) == len(members):
            if len(set(present.values())) > 1:
                self.outcome.wrong.append(f"collectives {present}")
            del self.meetings[event.peer]
            self.changed()
        else:
            self.wait(lambda: self.meetings.get(event.peer) is not present)

    def issue(self, rank: int, event: Event) -> None:
        """Begins a sum and goes on."""
        present = self.sums[event.peer, event.tag]
        present[rank] = event
        if len(set(present.values())) > 1:
            self.outcome.wrong.append(f"sums {present}")
        self.changed()

    def is_summed(self, rank: int, event: Event) -> bool:
        """Whether all members have begun a sum that this rank has begun."""
        present = self.sums[event.peer, event.tag]
        return rank in present and len(present) == len(self.members[event.peer])


class MailExecution(Execution):
    """Ranks whose halos go through queues of so many places: one for each (from, to, lane).

    Counted as in the memory of one machine: every message and every receive has a number.
    """

    def __init__(self, programs: Programs, members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.letters: dict[tuple[int, int, int], list[Post]] = defaultdict(list)
        self.wanted: dict[tuple[int, int, int], list[Post]] = defaultdict(list)
        self.num_read: dict[tuple[int, int, int], int] = defaultdict(int)

    def run(self) -> Outcome:
        outcome = super().run()
        for key, letters in self.letters.items():
            outcome.left += len(letters) - self.num_read[key]
        for wanted in self.wanted.values():
            outcome.left += sum(not post.done for post in wanted)
        return outcome

    def note(self, rank: int, event: Event) -> Post:
        """Keeps a post; who expects a letter knows its number."""
        return Post(event, rank) if event.mail else super().note(rank, event)

    def post(self, posts: list[Post]) -> None:
        """Puts letters into their queues, one after the other; a full one keeps the rank."""
        for post in posts:
            if not post.event.mail:
                super().post([post])
                continue
            key = (*post.ends, post.event.lane)
            if post.event.kind == "recv":
                self.wanted[key].append(post)
                continue
            letters = self.letters[key]
            self.wait(lambda: len(letters) - self.num_read[key] < SLOTS)  # noqa: B023
            letters.append(post)
            self.changed()

    def receive(self, rank: int, event: Event) -> bool:
        """Reads a letter; a rank that would read another one than the next fails."""
        if not event.mail:
            return super().receive(rank, event)
        key = (event.peer, rank, event.lane)
        letters, wanted = self.letters[key], self.wanted[key]

        def number() -> int | None:
            mine = (i for i, p in enumerate(wanted) if not p.done and p.event.tag == event.tag)
            return next(mine, None)

        self.wait(lambda: number() is not None and len(letters) > number())
        index = number()
        if index != self.num_read[key]:
            self.outcome.wrong.append(f"rank {rank} reads {event.what} out of order")
            return False
        self.compare(letters[index], wanted[index])
        wanted[index].done = True
        self.num_read[key] += 1
        self.changed()
        return True


class StreamExecution(Execution):
    """Ranks with a thread for each peer, which runs what is posted for that peer in order."""

    separate = False
    """Whether each kind of message has threads of its own, sends and receives apart."""

    def __init__(self, programs: Programs, members: list[list[int]]) -> None:
        super().__init__(programs, members)
        self.queues: dict[tuple[int, int, str], deque[list[Post]]] = {}

    def place(self, post: Post) -> tuple[int, str]:
        """Which of a rank's threads runs a post."""
        if self.separate and post.event.channel:
            return -1, f"channel {post.event.channel}"
        kind = f"{post.event.kind} {post.event.lane}" if self.separate else "any"
        return post.event.peer, kind

    def post(self, posts: list[Post]) -> None:
        """Hands the parts of a group call to the threads of their peers."""
        for place in dict.fromkeys(map(self.place, posts)):
            key = (posts[0].rank, *place)
            if key not in self.queues:
                self.queues[key] = deque()
                self.start(lambda queue=self.queues[key]: self.stream(queue))  # type: ignore[misc]
            self.queues[key].append([post for post in posts if self.place(post) == place])
        self.changed()

    def stream(self, queue: deque[list[Post]]) -> None:
        """Runs what one rank posts for another, one call after the other."""
        while True:
            self.wait(lambda: bool(queue))
            unit = queue.popleft()
            for post in unit:
                lane = post.event.lane if self.separate else 0
                self.encounter(post, (*post.ends, lane))
            self.changed()
            self.wait(lambda unit=unit: all(post.met for post in unit))  # type: ignore[misc]
            for post in unit:
                post.done = True
            self.changed()


class SeparateExecution(StreamExecution):
    """Ranks with many threads for each peer."""

    separate = True


EXECUTIONS = {
    RENDEZVOUS: Execution,
    MAILBOXES: MailExecution,
    STREAMS: StreamExecution,
    SEPARATE: SeparateExecution,
}


def called(program: list[Event], at: int) -> list[Event]:
    """Returns the group call that begins at an event: this one, and those of its number."""
    number = program[at].call
    return (
        list(itertools.takewhile(lambda e: e.call == number, program[at:]))
        if number
        else [program[at]]
    )


def execute(programs: Programs, members: list[list[int]], semantics: str = RENDEZVOUS) -> Outcome:
    """Executes programs in threads of this process."""
    return EXECUTIONS[semantics](programs, members).run()
