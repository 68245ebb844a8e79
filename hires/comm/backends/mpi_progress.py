"""Completes the requests of MPI: a rank that waits polls them, and while it computes a thread does.

An MPI moves data only inside its calls. A rank that computes after it began to send a large message
would keep the receiver waiting until its own next call, so a thread calls MPI now and then:

    main     isend . compute ...................................... wait (polls)
    thread        .  .    .      .           .             .        -
                  after a sixteenth of the time since the last message: none is later than that

One lock keeps all calls of a rank apart (``MPI_THREAD_SERIALIZED``): the thread only ever tries to
take it, so the main thread never waits for more than one short call. No request is waited for
inside MPI, whose own waits know no time limit and keep a core busy.

A request that is late stays open: MPI reads and writes its memory until it is complete, also when
its caller has given up. The thread completes what no rank waits for any more.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hires.comm.backends.works import wait
from hires.core.errors import PeerError

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger(__name__)

LOOKS = 100  # before a waiting rank offers its core: a tenth of a millisecond
BUSY_S = 5e-4  # how long it does so before it sleeps
PAUSE_S = 1e-4  # between two looks of a rank that waits for long
SHARE = 16  # the thread polls again after this part of the time since the last message
LEAST_S, MOST_S = 5e-4, 1e-2  # between two polls of the thread
LINGER_S = 0.1  # how long after the last message the thread goes to sleep, and between two looks
LEAST_BYTES_PER_S = 1e9  # a large operation moves in many small steps, each at a poll
BURST = 8  # calls at each poll: a large message may move in pieces, a few at each call
SMALL_BYTES = 4096  # up to this size a rank owes the other side nothing once it has a message

What = str | tuple[str, int, int]
"""An operation in words, or a template with the numbers that complete it."""


class MpiWork:
    """Requests that are one operation; ``what`` names it if it is late.

    The list ``requests`` is the work's own from then on.
    ``pieces``: the buffers that requests receive: MPI itself accepts a message that is shorter.
    """

    __slots__ = "_pieces", "_progress", "_requests", "_timeout_s", "_what", "error", "tensors"

    def __init__(
        self,
        progress: Progress,
        requests: list[MPI.Request],
        tensors: Sequence[Tensor],
        timeout_s: float,
        what: What,
        pieces: Sequence[MPI.buffer] = (),
    ) -> None:
        self._progress, self._requests, self.tensors = progress, requests, tensors
        self._pieces, self._timeout_s, self._what = pieces, timeout_s, what
        self.error: Exception | None = None
        """The first of MPI, once no request is under way."""

    def is_completed(self) -> bool:
        """Whether it is complete; never waits. Its tensors belong to the caller from then on.

        An error of MPI is raised here, and at every later look, once no request is under way.
        """
        if self._requests:
            with self._progress.lock:
                if not self.test():
                    return False
        if self.error is not None:
            raise self.error
        return True

    def test(self) -> bool:
        """Whether it is complete, in a thread that holds the lock; errors wait for the caller."""
        requests, status, error = self._requests, self._progress.status, None
        while requests:
            try:
                if not requests[-1].Test(status):
                    return False
            except Exception as failed:  # of this request alone, which ends with it
                error = failed
            if self._pieces:
                error = self._other_size(status, error)
            self.error = self.error or error
            requests.pop()
        self._progress.end(self)
        self.tensors = ()
        return True

    def _other_size(self, status: Any, error: Exception | None) -> Exception | None:
        # The error of a receive that has ended: MPI's own, or its message has another size.
        size = self._pieces[len(self._requests) - 1].nbytes
        if error is not None:
            if getattr(error, "Get_error_class", int)() != self._progress.truncated:
                return error
            return PeerError(f"{self._words} is longer than its receive of {size} bytes")
        if status.count != size:
            return PeerError(f"{self._words} has {status.count} bytes, and its receive {size}")
        return None

    def _failed(self) -> Exception | None:
        # The error of any of the requests, which may be why another one is late.
        with self._progress.lock:
            for request in () if self._pieces else self._requests:
                try:
                    request.Test()
                except Exception as error:
                    self.error = self.error or error
        return self.error

    @property
    def _words(self) -> str:
        what = self._what
        return what if isinstance(what, str) else what[0] % what[1:]

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Returns when it is complete; CommError: it is not, after ``timeout`` or the group's."""
        progress = self._progress
        try:
            with progress.lock:
                for _ in range(LOOKS):
                    if self.test():
                        break
        finally:
            if self._requests:  # kept, whatever ends the wait
                progress.begin(self)
        if not self.is_completed():
            self._wait(self._timeout_s if timeout is None else timeout.total_seconds())
        return True

    def _wait(self, timeout_s: float) -> None:
        busy_s = sum(tensor.nbytes for tensor in self.tensors) / LEAST_BYTES_PER_S
        until = time.monotonic() + max(busy_s, BUSY_S)

        def sleep(left_s: float) -> None:
            # Until then it only offers its core.
            os.sched_yield() if time.monotonic() < until else time.sleep(PAUSE_S)

        self._progress.waits.append(None)
        try:
            if not wait(self.is_completed, timeout_s, sleep, 1, LOOKS):
                raise self._failed() or PeerError(f"{self._words} took over {timeout_s:g} s")
        finally:
            self._progress.waits.pop()


class Progress:
    """All calls of MPI of this rank; ``advance`` is one that moves every request on."""

    status: Any = None
    """Filled by a call of MPI, and read at once; one serves all works of a rank."""
    truncated = -1
    """MPI's error class of a message that is too long."""

    def __init__(self, advance: Callable[[], object]) -> None:
        self.lock = threading.Lock()
        self.waits: list[None] = []  # one for each thread that polls, so that this one need not
        self._advance = advance
        self._open: dict[MpiWork, None] = {}  # also keeps their tensors alive
        self._moved_s = 0.0  # when a message last began or ended
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
        self._thread.start()

    def begin(self, work: MpiWork) -> MpiWork:
        """Keeps a work, and moves it on, until it is complete; returns it."""
        with self.lock:
            self._open[work] = None
            self._moved_s = time.monotonic()
        self._wake.set()
        return work

    def end(self, work: MpiWork) -> None:
        """Forgets a work that is complete; the caller holds the lock."""
        if work in self._open or any(one.nbytes > SMALL_BYTES for one in work.tensors):
            self._open.pop(work, None)
            self._moved_s = time.monotonic()

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            idle_s = time.monotonic() - self._moved_s
            if self._open or idle_s < LINGER_S:
                time.sleep(min(max(idle_s / SHARE, LEAST_S), MOST_S))
            else:
                self._wake.wait(LINGER_S)
                self._wake.clear()
            # Also when all is complete here: what this rank owes the others for it, as MPICH's last
            # acknowledgement of a large message, moves only inside calls.
            if not self.waits and self.lock.acquire(blocking=False):
                try:
                    for _ in range(0 if self._closed else BURST):
                        self._advance()
                    # Also those that no caller waits for any more; a few at a time, in turn: the
                    # main thread may wait for the lock.
                    for work in [*itertools.islice(self._open, BURST)]:
                        if not work.test():
                            self._open[work] = self._open.pop(work)
                except Exception as error:  # ranks that wait poll, and raise their own
                    log.error("MPI moves nothing on while this rank computes: %s", error)
                    self._advance = int
                finally:
                    self.lock.release()
