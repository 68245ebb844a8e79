"""Defines the handle of an operation under way, which waits for it and raises its error."""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any, NoReturn

import torch
from torch import Tensor

from hires.comm.backends.fifo import run_in_thread
from hires.comm.dispatch import Dispatch
from hires.comm.guarded_waits import FAILURES, failure
from hires.comm.message_log import MessageLog
from hires.comm.transport import activity, transport
from hires.core.errors import CommError, PeerError
from hires.core.ranks.timeline import HALO

SHORTEST = datetime.timedelta(milliseconds=1)


class Handle:
    """An operation under way; its tensors belong to it until it is complete."""

    __slots__ = (
        "_ended",
        "_error",
        "_future",
        "_issue",
        "_log",
        "_number",
        "_results",
        "_tag",
        "_then",
        "_work",
        "call",
    )  # fmt: skip

    def __init__(
        self,
        work: Any,
        call: Dispatch | None,
        results: Sequence[Tensor] = (),
        then: Sequence[Callable[[], Any]] = (),
        tag: int = -1,
        number: int = -1,
    ) -> None:
        self._number = number  # among the calls that this rank keeps
        self._work, self.call, self._then, self._tag = work, call, then, tag
        self._results = results
        self._log: MessageLog | None = None
        self._error: CommError | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._ended: threading.Event | None = None  # once a thread waits for its future

    def keep_in(self, log: MessageLog, num_bytes: int, issued: float) -> None:
        """Keeps it in a log from now on, where its call ends, to the end of its wait."""
        assert self.call is not None
        self._log = log
        self._issue = log.issue(self.call.operation, self.call.way, num_bytes, issued)

    def wait(self, timeout: float | datetime.timedelta | None = None, kind: str = HALO) -> bool:
        """Returns True when it is complete.

        ``timeout``: seconds; without one, the longest wait of the group. ``kind``: what the time
        line calls the wait.

        Raises:
            CommError: the other side died, or is late; it names operation, ranks and backend.
        """
        if self._work is not None:
            self._wait(timeout, kind)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, timeout: float | datetime.timedelta | None, kind: str) -> None:
        call = self.call
        assert call is not None
        recorder = call.group.recorder if call.group is not None else None
        begin = recorder.clock.now() if recorder is not None else None
        started = clock()
        finish = self._work.wait if self._ended is None else self._join
        if timeout is not None:
            if not isinstance(timeout, datetime.timedelta):
                timeout = datetime.timedelta(seconds=timeout)
            # Libraries count in whole milliseconds, and take 0 for no limit.
            finish = functools.partial(finish, max(timeout, SHORTEST))
        outer = activity.begin(call.what, call.peer, self._tag, call.ranks, self._number)
        try:
            finish()
        except FAILURES as error:
            if error is self._error:  # of the thread of its future, which has named the operation
                raise
            failed = failure(call.what, error, call.backend, self._number)
            if timeout is None:
                self._error, self._work = failed, None
            raise failed from error
        finally:
            activity.end(outer)
        if self._ended is None:
            self._finish()
            self._note(started)
        if call.ranks and transport.streams is not None:
            transport.streams.add(call.what, call.ranks)
        if recorder is not None and recorder.action:
            recorder.note(kind, begin, call.label)

    def is_completed(self) -> bool:
        """Whether it is complete, or has failed; never waits."""
        if self._work is None:
            return True
        if self._ended is not None:
            return self._ended.is_set()
        with contextlib.suppress(CommError):  # until the next wait
            try:
                if not self._work.is_completed():
                    return False
            except FAILURES as error:
                self._fail(error)
            started = clock()
            self._end(self._work)
            self._note(started)
        return True

    def exception(self) -> CommError | None:
        """Returns why it failed; None: it has not, so far."""
        self.is_completed()
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of its tensors, in a list, as the works of torch have.

        A thread of its own waits for it, so that what a user adds to the future holds up no other
        operation; for tensors of a device, whose streams are those of this thread, this one does.
        """
        if self._future is None:
            devices = [*dict.fromkeys(one.device for one in self._results if not one.is_cpu)]
            gpus: list[int | str | torch.device]
            gpus = [one for one in devices if one.type == "cuda"]
            self._future = torch.futures.Future(devices=gpus)
            if devices:
                with contextlib.suppress(CommError):  # the future raises it
                    self.wait()
            if self.is_completed():
                self._settle()
            else:
                self._ended = threading.Event()
                try:
                    run_in_thread(self._run)
                except RuntimeError as error:  # no more threads; the operation itself continues
                    self._ended = self._future = None
                    assert self.call is not None
                    raise failure(self.call.what, error, self.call.backend) from error
        return self._future

    def _run(self) -> None:
        assert self._ended is not None
        started = clock()
        with contextlib.suppress(CommError):  # the future raises it
            self._end(self._work)
        if self._log is not None:
            self._log.note_later(self._issue, started)
        self._ended.set()
        self._settle()

    def _settle(self) -> None:
        assert self._future is not None
        if self._error is None:
            self._future.set_result([*self._results])
        else:
            self._future.set_exception(self._error)

    def _join(self, timeout: datetime.timedelta | None = None) -> None:
        assert self._ended is not None
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise PeerError("it took longer")
        if self._error is not None:
            raise self._error

    def _end(self, work: Any) -> None:
        # Waits for what is complete, or in a thread: without a note of what the rank waits in.
        assert self.call is not None
        try:
            work.wait()
        except Exception as error:
            self._fail(error)
        self._finish()

    def _fail(self, error: Exception) -> NoReturn:
        # Another thread takes the operation for complete once it has no work: that goes last.
        assert self.call is not None
        self._error = failed = failure(self.call.what, error, self.call.backend, self._number)
        self._work = None
        raise failed from error

    def _finish(self) -> None:
        # Another thread takes the operation for complete once it has no work: that goes last.
        then, self._then = self._then, ()
        try:
            for one in then:
                one()
        except Exception as error:
            assert self.call is not None
            self._error = failure(self.call.what, error, self.call.backend)
            raise self._error from error
        finally:
            self._work = None

    def _note(self, started: float) -> None:
        if self._log is not None:
            self._log.note(self._issue, started)
