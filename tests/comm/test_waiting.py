"""What waits does so in the program's order and for no longer than its limit; errors reach it."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hires.comm.backends import works
from hires.comm.backends.backend import RESERVED_TAGS, TAGS
from hires.comm.backends.gloo_backend import slot_of
from hires.comm.backends.works import Fifo, JoinedWork, pauses, wait
from hires.comm.dispatch import Dispatch
from hires.comm.handles import Handle
from hires.comm.staging import Staging
from hires.core.errors import CommError, PeerError
from hires.core.ranks import meeting
from tests.helpers.patience import PATIENCE_S, until

LOST = PeerError("rank 1 is gone")


class FakeWork:
    """A work that is complete after some looks, or ends with an error; keeps its waits' limits."""

    def __init__(self, error: Exception | None = None, looks: int = 0) -> None:
        self.error, self.looks, self.limits = error, looks, []

    def is_completed(self) -> bool:
        if self.error is not None:
            raise self.error
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.limits.append(timeout)
        if self.error is not None or self.looks > 1:
            raise self.error or CommError("it took over the limit")
        return True


# ---- handles of operations


def handle_of(work: Any, then: Callable[[], Any] = lambda: None) -> Handle:
    call = Dispatch(len, None, Staging(("cpu",)), True, 0, 0, "a sum", "sum", "gloo")
    return Handle(work, call, [then])


def overlaps() -> None:
    """As the copy back into a tensor whose numbers share memory."""
    raise RuntimeError("more than one element")


@pytest.mark.parametrize(
    ("error", "then", "text"),
    [(None, overlaps, "more than one element"), (LOST, lambda: None, "rank 1 is gone")],
)
def test_error_of_an_operation_or_after_it_is_raised_by_every_wait(error, then, text):
    handle = handle_of(FakeWork(error), then)
    for _ in range(2):
        with pytest.raises(CommError, match=f"^a sum over gloo failed: {text}"):
            handle.wait(PATIENCE_S)
    assert handle.is_completed()
    assert isinstance(handle.exception(), CommError)


@pytest.mark.parametrize("limit", [0, 0.0004, -1, datetime.timedelta(0)])
def test_wait_of_no_time_is_not_a_wait_without_limit(limit: float | datetime.timedelta):
    work = FakeWork()
    handle_of(work).wait(limit)
    assert work.limits == [datetime.timedelta(milliseconds=1)]


# ---- queues of operations that block


def test_operations_run_in_the_order_of_the_program_and_inline_where_none_is_open():
    queue = Fifo("test-fifo")
    seen, gate, thread = [], threading.Event(), threading.current_thread
    queue.run(lambda: seen.append(thread()))
    assert seen.pop() is thread()
    first = queue.begin(lambda: gate.wait(PATIENCE_S) and seen.append(0))
    others = [queue.begin(lambda i=i: seen.append(i)) for i in range(1, 100)]
    assert not first.is_completed()
    threading.Timer(0.05, gate.set).start()
    queue.run(seen.append, 100)  # waits for all before it
    assert seen == [*range(101)]
    assert all(work.is_completed() for work in (first, *others))
    queue.close()


def test_error_reaches_its_waiter_and_those_behind_unless_it_is_of_an_argument():
    queue = Fifo("test-errors")
    with pytest.raises(ValueError, match="invalid literal"):
        queue.begin(lambda: int("x")).wait()
    assert queue.begin(lambda: None).wait()

    def fail() -> None:
        raise CommError("rank 1 did not come")

    failed, behind = queue.begin(fail), queue.begin(lambda: None)
    for _ in range(2):
        with pytest.raises(CommError, match="rank 1 did not come"):
            failed.wait()
    with pytest.raises(CommError, match="it was not begun: rank 1"):
        behind.wait()
    queue.close()


def test_wait_has_a_limit_and_close_fails_what_has_not_run(monkeypatch):
    monkeypatch.setattr(works, "CLOSE_S", 0.05)
    queue, gate = Fifo("test-closed"), threading.Event()
    hangs = queue.begin(lambda: gate.wait(PATIENCE_S))
    with pytest.raises(CommError, match=r"it took over 0\.01 s"):
        hangs.wait(datetime.timedelta(seconds=0.01))
    behind = queue.begin(lambda: None)
    queue.close()
    gate.set()
    assert hangs.wait()
    with pytest.raises(CommError, match="it was not begun: its communicator was closed"):
        behind.wait()
    until(lambda: "test-closed" not in [thread.name for thread in threading.enumerate()])


# ---- gloo


ENDS_EARLY = """
import os, sys, time
import torch
from hires import comm
from hires.core.ranks.world import World
child = os.fork()
rank = int(child == 0)
comm.init(["gloo"], world=World(rank, 2, rank, 2, "127.0.0.1", int(sys.argv[1]), 0), timeout_s=30.0)
handle = comm.irecv(torch.zeros(4), 1 - rank)
assert not handle.is_completed()
time.sleep(0.2)  # the threads are in the library
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.dist
def test_process_ends_well_while_threads_wait_in_the_library():
    with meeting.reserve_port(0) as port:
        subprocess.run([sys.executable, "-c", ENDS_EARLY, str(port)], check=True, timeout=60)


def test_tags_and_sizes_of_messages_of_gloo_have_slots_of_their_own():
    tags = [*range(3072), 100_000, 130_047, *range(RESERVED_TAGS, TAGS)]
    for sizes in ((0, 1, 8, 16), (4096, 8192, 2**20, 2**21, 3 * 2**20)):
        slots = {slot_of(tag, size) for tag in tags for size in sizes}
        assert len(slots) == len(tags) * len(sizes)
        assert 0 <= min(slots) <= max(slots) < TAGS
    with pytest.raises(ValueError, match="beyond those of gloo"):
        slot_of(130_048, 8)


# ---- works that are one operation, and polls


@pytest.mark.parametrize("place", [0, 1])
def test_work_that_failed_fails_the_operation(place: int):
    works, ran = [FakeWork(), FakeWork()], list[int]()
    works[place] = FakeWork(LOST)
    joined = JoinedWork(works, lambda: ran.append(1))
    for _ in range(2):
        assert joined.is_completed()
        with pytest.raises(PeerError, match="rank 1 is gone"):
            joined.wait()
    assert ran == []


def test_late_work_stays_under_way_and_what_follows_runs_once():
    work, ran = FakeWork(looks=9), list[int]()
    joined = JoinedWork([work], lambda: ran.append(1))
    assert not joined.is_completed()
    with pytest.raises(CommError, match="over the limit"):
        joined.wait(datetime.timedelta(seconds=0.001))
    work.looks = 0
    assert joined.is_completed()
    assert joined.wait()
    assert ran == [1]


def test_process_that_was_stopped_past_its_limit_sees_what_came_meanwhile():
    looks = iter((False, False, True))

    def done() -> bool:
        came = next(looks)
        time.sleep(0.02)
        return came

    assert wait(done, 0.01, pauses(1e-4), 1)
    assert not wait(lambda: False, 0.01, pauses(1e-4), 1)
