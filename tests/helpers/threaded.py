"""Programs of events executed for real: a thread for each rank, blocking on conditions.

It shares no code with the proof. A thread that blocks says what it waits for, and
whoever changes something wakes those whose wait is over, so when all threads block nobody is left
to wake them: a deadlock is reported at once.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from hires.plan.event import ALONE, Event

HARD_TIMEOUT_S = 60.0
"""Longer than any program runs: only a mistake in this file is ever caught by it."""

Condition = Callable[[], bool]


class AllBlockedError(Exception):
    pass


class Threads:
    """Threads that share one lock and know when all of them are blocked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[threading.Condition, Condition] = {}
        self.num_live = 0
        self.stopped = False
        self.timed_out = False
        self.threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> None:
        def body() -> None:
            with self.lock:
                try:
                    work()
                except AllBlockedError:
                    pass
                finally:
                    self.num_live -= 1
                    self.changed()
                    self._stop_if_all_wait()

        self.num_live += 1
        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def wait(self, over: Condition) -> None:
        """Blocks the calling thread, which holds the lock, until ``over()``."""
        if self.stopped:
            raise AllBlockedError
        if over():
            return
        condition = threading.Condition(self.lock)
        self.waiting[condition] = over
        self._stop_if_all_wait()
        while condition in self.waiting and not self.stopped:
            if not condition.wait(HARD_TIMEOUT_S):
                self.timed_out = True
                self._stop()
        if self.stopped:
            raise AllBlockedError

    def changed(self) -> None:
        for condition in [c for c, over in self.waiting.items() if over()]:
            del self.waiting[condition]
            condition.notify()

    def _stop_if_all_wait(self) -> None:
        if self.num_live and len(self.waiting) == self.num_live:
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        for condition in self.waiting:
            condition.notify()


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
        return not (self.stuck or self.wrong or self.left)


@dataclass(eq=False)
class Post:
    event: Event
    rank: int
    met: bool = False
    done: bool = False

    @property
    def ends(self) -> tuple[int, int]:
        other = self.event.peer
        return (self.rank, other) if self.event.kind == "send" else (other, self.rank)


class Execution(Threads):
    """Ranks whose messages meet as their routes do it.

    Most meet in a box for each (source, target, backend, tag). On nccl a thread for each
    communicator of a rank runs what is posted there, one call after the other.
    """

    def __init__(self, programs: Programs, members: list[list[int]]) -> None:
        super().__init__()
        self.programs, self.members = programs, members
        self.boxes: dict[Hashable, deque[Post]] = defaultdict(deque)
        self.sends: list[list[Post]] = [[] for _ in programs]
        self.receives: dict[Hashable, deque[Post]] = defaultdict(deque)
        self.meetings: dict[Hashable, dict[int, Event]] = defaultdict(dict)
        # As a library does: the nth sums that the ranks begin on a group are one sum.
        self.sums: dict[Hashable, dict[int, Event]] = defaultdict(dict)
        self.begun: dict[Hashable, list[int]] = defaultdict(list)  # tags by rank and group
        self.queues: dict[Hashable, deque[list[Post]]] = {}
        self.ended: set[int] = set()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        with self.lock:
            for rank in range(len(self.programs)):
                self.start(lambda rank=rank: self.walk(rank))  # type: ignore[misc]
        for thread in self.threads:
            thread.join(HARD_TIMEOUT_S)
        assert not self.timed_out, "the threads lost a wake-up"
        self.outcome.stuck = [r for r in range(len(self.programs)) if r not in self.ended]
        left = sum(not post.done for posts in self.sends for post in posts)
        left += sum(map(len, self.receives.values()))
        self.outcome.left = left
        return self.outcome

    def walk(self, rank: int) -> None:
        program, at = self.programs[rank], 0
        while at < len(program):
            event, steps = program[at], 1
            if event.kind in ("send", "recv"):
                steps = self.post(rank, program, at)
            elif event.kind == "wait_recv":
                self.receive(rank, event)
            elif event.kind in ("wait_send", "wait_sends"):
                self.wait(lambda event=event: self.all_sent(rank, event))  # type: ignore[misc]
            elif event.kind == "issue":
                self.issue(rank, event)
            elif event.kind == "wait_issued":
                self.wait(lambda event=event: self.is_summed(rank, event))  # type: ignore[misc]
            elif event.role != ALONE:
                self.meet(rank, event)
            at += steps
        self.ended.add(rank)

    def post(self, rank: int, program: list[Event], at: int) -> int:
        """Begins a message, or a whole group call of nccl; returns how many events that is."""
        event = program[at]
        call = [event]
        if event.backend == "nccl" and event.call:
            call = [*itertools.takewhile(lambda e: e.call == event.call, program[at:])]
        posts = [Post(one, rank) for one in call]
        for post in posts:
            one = post.event
            if one.kind == "send":
                self.sends[rank].append(post)
            else:
                self.receives[rank, one.peer, one.backend, one.tag].append(post)
        if event.backend == "nccl":
            self.enqueue(posts)
        else:
            other = self.encounter(posts[0], (*posts[0].ends, event.backend, event.tag))
            if other:
                posts[0].done = other.done = True
        self.changed()
        return len(call)

    def receive(self, rank: int, event: Event) -> None:
        posted = self.receives[rank, event.peer, event.backend, event.tag]
        self.wait(lambda: bool(posted) and posted[0].done)
        posted.popleft()

    def all_sent(self, rank: int, event: Event) -> bool:
        return all(
            post.done
            for post in self.sends[rank]
            if event.kind == "wait_sends"
            or (post.event.peer, post.event.tag, post.event.backend)
            == (event.peer, event.tag, event.backend)
        )

    def encounter(self, post: Post, address: Hashable) -> Post | None:
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
        mine, theirs = ((e.tag, e.shape, e.dtype, e.what) for e in (post.event, other.event))
        if mine != theirs:
            self.outcome.wrong.append(f"{post.ends}: {mine} is not {theirs}")

    def enqueue(self, posts: list[Post]) -> None:
        def place(post: Post) -> Hashable:
            one = post.event
            return (one.channel,) if one.channel else (one.peer, one.kind, one.lane)

        for key in dict.fromkeys(map(place, posts)):
            queue = self.queues.get((posts[0].rank, key))
            if queue is None:
                queue = self.queues[posts[0].rank, key] = deque()
                self.start(lambda queue=queue: self.stream(queue))  # type: ignore[misc]
            queue.append([post for post in posts if place(post) == key])

    def stream(self, queue: deque[list[Post]]) -> None:
        while True:
            self.wait(lambda: bool(queue))
            unit = queue.popleft()
            for post in unit:
                self.encounter(post, (*post.ends, "nccl", post.event.lane))
            self.changed()
            self.wait(lambda unit=unit: all(post.met for post in unit))  # type: ignore[misc]
            for post in unit:
                post.done = True
            self.changed()

    def meet(self, rank: int, event: Event) -> None:
        members = self.members[event.peer] if event.kind != "barrier" else range(len(self.programs))
        if rank not in members:
            self.outcome.wrong.append(f"{rank} is not in group {event.peer}")
            return
        key = event.peer, event.backend
        present = self.meetings[key]
        present[rank] = event
        if len(present) == len(members):
            if len(set(present.values())) > 1:
                self.outcome.wrong.append(f"collectives {present}")
            del self.meetings[key]
            self.changed()
        else:
            self.wait(lambda: self.meetings.get(key) is not present)

    def issue(self, rank: int, event: Event) -> None:
        begun = self.begun[rank, event.peer]
        present = self.sums[event.peer, len(begun)]
        begun.append(event.tag)
        present[rank] = event
        if len(set(present.values())) > 1:
            self.outcome.wrong.append(f"sums {present}")
        self.changed()

    def is_summed(self, rank: int, event: Event) -> bool:
        begun = self.begun[rank, event.peer]
        present = self.sums[event.peer, begun.index(event.tag)] if event.tag in begun else {}
        return rank in present and len(present) == len(self.members[event.peer])


def execute(programs: Programs, members: list[list[int]]) -> Outcome:
    return Execution(programs, members).run()
