"""Waits for what another rank does, and queues blocking operations, one queue a communicator.

    caller    begin a . begin b . compute ..... run c (waits for its turn)      run d (inline)
    thread            a ........ b ............ c                               sleeps

An operation that is begun runs in the queue's thread, which starts with the first one and sleeps
while there is none. A synchronous one runs in its caller's thread if nothing is under way, so it
costs no change of threads.

A wait looks first busily, then with the core offered (the system may have put the other rank behind
this one there), then asleep: on a futex where the other rank shares memory (:mod:`.counters`), else
for a pause. Where a library's own wait blocks, it runs in a thread (:func:`run_in_thread`). Several
works that are one operation are a :class:`JoinedWork`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hires.core.errors import CommError, PeerError

if TYPE_CHECKING:
    from hires.comm.backends.backend import Work

CLOSE_S = 2.0
"""How long the end of a queue waits for an operation that is under way."""


def wait(
    done: Callable[[], object],
    limit_s: float,
    sleep: Callable[[float], object],
    spins: int = 0,
    looks: int = 1,
) -> bool:
    """Returns True once ``done()`` does, or False after ``limit_s`` seconds and a last look.

    Args:
        done: what is waited for; its errors end the wait.
        limit_s: longest wait after the first looks.
        sleep: called with the seconds that are left, between two looks; it may return early.
        spins: how often the rank offers its core before it sleeps.
        looks: looks before each of these.
    """
    for _ in range(spins):
        for _ in range(looks):
            if done():
                return True
        os.sched_yield()
    until = time.monotonic() + limit_s
    while not done():
        left_s = until - time.monotonic()
        if left_s <= 0:
            return bool(done())  # this process may have been stopped since the look before
        sleep(left_s)
    return True


def pauses(pause_s: float) -> Callable[[float], None]:
    """Returns what sleeps for ``pause_s`` seconds, and for no longer than is left."""
    return lambda left_s: time.sleep(min(left_s, pause_s))


busy_threads = set[threading.Thread]()
"""Those of :func:`run_in_thread` whose calls have not returned."""


def run_in_thread(call: Callable[[], Any]) -> Future[None]:
    """Runs a call in a thread of its own; returns at once.

    RuntimeError: the system has no more threads; the call does not run.
    """
    future = Future[None]()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)
        finally:
            busy_threads.discard(thread)

    thread = threading.Thread(target=run, name="comm-wait", daemon=True)
    busy_threads.add(thread)
    try:
        thread.start()
    except RuntimeError:
        busy_threads.discard(thread)
        raise
    return future


class FifoWork:
    """An operation under way; ``tensors`` belong to it until it is complete."""

    __slots__ = ("_call", "_done", "_error", "_tensors")

    def __init__(self, call: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        self._call: Callable[[], Any] | None = call
        self._tensors = tensors
        self._error: BaseException | None = None
        self._done = threading.Lock()  # held until it is complete
        self._done.acquire()

    def is_completed(self) -> bool:
        """Whether it is complete, or has failed; never waits."""
        return not self._done.locked()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Returns when it is complete; CommError: it failed, or is not after ``timeout``.

        Without ``timeout`` it ends with the operation, which has a limit of its own.
        """
        limit_s = -1 if timeout is None else max(timeout.total_seconds(), 0)
        if not self._done.acquire(timeout=limit_s):
            raise PeerError(f"it took over {limit_s:g} s")
        self._done.release()
        if self._error is not None:
            raise self._error
        return True

    def run(self, broken: BaseException | None = None) -> BaseException | None:
        """Runs the operation, or fails as ``broken``; returns why it failed."""
        call, self._call = self._call, None
        assert call is not None
        try:
            if broken is not None:
                raise CommError(f"it was not begun: {broken}") from broken
            call()
        except BaseException as error:  # its waiter raises it
            self._error = error
        self._done.release()
        return self._error


class Fifo:
    """The operations of one communicator; ``name``: of its thread.

    An operation that failed leaves the other ranks somewhere inside it, so those after it fail,
    too, unless the error is one of its arguments (ValueError, TypeError).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: deque[FifoWork] = deque()  # begun and not complete, the oldest first
        self._begun: SimpleQueue[FifoWork | None] = SimpleQueue()
        self._turn = threading.Lock()  # held by the thread that runs an operation
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._broken: BaseException | None = None

    def run(self, call: Callable[..., Any], *args: Any) -> None:
        """Runs a blocking operation after those that were begun, and returns when it is complete.

        Where nothing is under way it runs in this thread. Its error is raised here.
        """
        if self._open or not self._turn.acquire(blocking=False):
            self.begin(lambda: call(*args)).wait()
            return
        try:
            if self._broken is not None:
                raise CommError(f"it was not begun: {self._broken}") from self._broken
            call(*args)
        except (ValueError, TypeError):
            raise
        except BaseException as error:
            self._broken = self._broken or error
            raise
        finally:
            self._turn.release()

    def begin(self, call: Callable[[], Any], tensors: Sequence[Tensor] = ()) -> FifoWork:
        """Queues a blocking operation behind those that were begun before; returns at once."""
        work = FifoWork(call, tensors)
        with self._start:
            if self._closed:  # by now its thread may have ended
                work.run(self._broken)
                return work
            self._open.append(work)
            self._begun.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return work

    def close(self) -> None:
        """Fails what has not run, and ends the thread, unless its operation lasts for too long."""
        self._broken = self._broken or CommError("its communicator was closed")
        with self._start:
            self._closed, thread = True, self._thread
            self._begun.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)

    def _run(self) -> None:
        while (work := self._begun.get()) is not None:
            with self._turn:
                error = work.run(self._broken)
                if error is not None and not isinstance(error, ValueError | TypeError):
                    self._broken = self._broken or error
                self._open.popleft()


class JoinedWork:
    """Several works that are one operation; ``then`` runs once, when all are complete.

    It fails with the first of them that does, and keeps them: a library may still use their memory.
    """

    def __init__(self, works: Sequence[Work], then: Callable[[], Any] | None = None) -> None:
        self._works, self._then = [*works], then
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether all are complete, or one has failed, which the next wait raises."""
        while self._works and self._error is None:
            try:
                if not self._works[-1].is_completed():
                    return False
                self._take()
            except Exception as error:
                self._error = error
        with contextlib.suppress(Exception):
            self._finish()
        return True

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Returns when all are complete."""
        end_s = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while self._works and self._error is None:
            if end_s is None:
                self._take()
            else:
                left_s = max(1e-3, end_s - time.monotonic())
                self._take(datetime.timedelta(seconds=left_s))
        self._finish()
        return True

    def _take(self, *limit: datetime.timedelta) -> None:
        # Waits for the last work; one that is only late stays under way.
        last = self._works[-1]
        try:
            last.wait(*limit)
        except Exception as error:
            if not limit or last.is_completed():
                self._error = error
            raise
        self._works.pop()

    def _finish(self) -> None:
        if self._error is not None:
            raise self._error
        then, self._then = self._then, None
        if then is not None:
            try:
                then()
            except Exception as error:
                self._error = error
                raise
