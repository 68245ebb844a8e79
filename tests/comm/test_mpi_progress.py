"""Requests move on while a rank computes, and a rank that waits gives up in time: a fake MPI."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from hires.comm.backends.mpi_progress import MpiWork, Progress
from hires.core.errors import CommError, PeerError
from tests.helpers.patience import until


class Library:
    """Its one request is complete after so many calls, which never overlap."""

    def __init__(self, calls: int) -> None:
        self.left, self._inside = calls, threading.Lock()

    def call(self) -> None:
        assert self._inside.acquire(blocking=False), "two threads in MPI at once"
        self.left -= 1
        self._inside.release()

    def Test(self, status: object = None) -> bool:  # noqa: N802 - mpi4py's
        self.call()
        return self.left <= 0


def begin(calls: int) -> tuple[Library, Progress, MpiWork]:
    library = Library(calls)
    progress = Progress(library.call)
    work = MpiWork(progress, [library], [torch.zeros(1)], 0.05, "the message")
    return library, progress, progress.begin(work)


def test_thread_moves_a_work_on_while_nobody_waits():
    library, progress, work = begin(100)
    until(lambda: library.left <= 0)
    assert work.is_completed()
    assert work.wait()
    progress.close()
    assert "mpi-progress" not in [thread.name for thread in threading.enumerate()]


def finish_late(progress: Progress, requests: list[Library]) -> weakref.ref[torch.Tensor]:
    """Gives up on an operation; returns its memory, which nothing but MPI uses any more."""
    tensor = torch.zeros(1)
    with pytest.raises(CommError, match="the sum took over 0 s"):
        MpiWork(progress, [*requests], [tensor], 0.0, "the sum").wait()
    return weakref.ref(tensor)


@pytest.mark.parametrize("num_requests", [1, 2])
def test_memory_of_a_late_operation_stays_until_mpi_has_done_with_it(num_requests: int):
    """It was freed, and the late rank's data came into whatever lay there then: SIGSEGV."""
    progress = Progress(lambda: None)
    requests = [Library(10**9) for _ in range(num_requests)]
    memory = finish_late(progress, requests)
    gc.collect()
    assert memory() is not None
    requests[0].left = 0  # the late rank has come
    until(lambda: memory() is None or num_requests == 2)
    requests[-1].left = 0
    until(lambda: memory() is None)  # and no rank waits for it any more
    assert not progress._open
    progress.close()


class Failing(Library):
    """MPI reports an error for it."""

    def Test(self, status: object = None) -> bool:  # noqa: N802 - mpi4py's
        raise RuntimeError("message truncated")


def test_error_of_mpi_leaves_the_thread_at_work_and_keeps_what_is_under_way():
    """The rank counted as one that polls from then on, so nothing moved while it computed."""
    library = Library(100)
    progress, other, tensor = Progress(library.call), Library(10**9), torch.zeros(1)
    with pytest.raises(RuntimeError, match="truncated"):
        MpiWork(progress, [Failing(1), other], [tensor], 0.1, "pieces").wait()
    assert len(progress._open) == 1
    until(lambda: library.left <= 0)
    other.left = 0
    until(lambda: not progress._open)
    progress.close()


def test_error_of_a_look_for_messages_is_logged_once_and_the_thread_goes_on(caplog):
    def fail() -> None:
        raise RuntimeError("network is down")

    progress, library = Progress(fail), Library(50)
    work = progress.begin(MpiWork(progress, [library], [torch.zeros(1)], 1.0, "the message"))
    until(lambda: "network is down" in caplog.text)
    library.left = 0
    until(lambda: work not in progress._open)  # by the thread
    progress.close()
    assert caplog.text.count("network is down") == 1


class Status:
    """How long the message of a receive was."""

    count = 0


class Receive:
    """A receive that is complete with so many bytes, or has failed with a class of error."""

    def __init__(self, num_bytes: int, error: int = 0) -> None:
        self.num_bytes, self.error = num_bytes, error

    def Test(self, status: Status) -> bool:  # noqa: N802 - mpi4py's
        if self.error:
            found = RuntimeError("Message truncated, error stack:")
            found.Get_error_class = lambda: self.error
            raise found
        status.count = self.num_bytes
        return True


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (Receive(8), ""),
        (Receive(4), "the message of rank 1 with tag 2 has 4 bytes, and its receive 8"),
        (Receive(8, 15), "the message of rank 1 with tag 2 is longer than its receive of 8 bytes"),
    ],
)
def test_message_of_another_size_is_an_error_of_its_sender(last: Receive, text: str):
    """MPI accepts one that is too short, and the rest of the tensor kept its old numbers."""
    progress = Progress(lambda: None)
    progress.status, progress.truncated = Status(), 15
    what = ("the message of rank %d with tag %d", 1, 2)
    work = MpiWork(
        progress,
        [Receive(16), last],
        [],
        1.0,
        what,
        pieces=[memoryview(bytes(size)) for size in (16, 8)],
    )
    if text:
        with pytest.raises(PeerError, match=text):
            work.wait()
    else:
        assert work.wait()
    progress.close()
