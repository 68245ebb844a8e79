"""Defines the handle of an operation under way, which waits for it and raises its error."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any, NoReturn

from hires.comm.comm_world import activity
from hires.comm.dispatch import Dispatch
from hires.comm.guarded_waits import FAILURES, failure
from hires.comm.message_log import MessageLog
from hires.core.errors import CommError
from hires.core.ranks.timeline import HALO
from hires.plan.traffic import CALLED

SHORTEST = datetime.timedelta(milliseconds=1)


class Handle:
    """An operation under way; its tensors belong to it until it is complete."""

    __slots__ = ("_error", "_issue", "_log", "_number", "_tag", "_then", "_work", "call")

    def __init__(
        self,
        work: Any,
        call: Dispatch | None,
        then: Sequence[Callable[[], Any]] = (),
        tag: int = -1,
        number: int = -1,
    ) -> None:
        self._number = number  # among the calls that this rank keeps
        self._work, self.call, self._then, self._tag = work, call, then, tag
        self._log: MessageLog | None = None
        self._error: CommError | None = None

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
        recorder, world = call.group.recorder, call.group.world
        begin = recorder.clock.now() if recorder is not None else None
        started = clock()
        finish = self._work.wait
        if timeout is not None:
            if not isinstance(timeout, datetime.timedelta):
                timeout = datetime.timedelta(seconds=timeout)
            # Libraries count in whole milliseconds, and take 0 for no limit.
            finish = functools.partial(finish, max(timeout, SHORTEST))
        operation = CALLED[call.operation]
        outer = activity.begin(call.what, call.peer, self._tag, call.ranks, self._number, operation)
        try:
            finish()
        except FAILURES as error:
            failed = failure(call.what, error, world, call.backend, self._number)
            if timeout is None:
                self._error, self._work = failed, None
            raise failed from error
        finally:
            activity.end(outer)
        self._finish()
        self._note(started)
        if call.ranks and world.streams is not None:
            world.streams.add(call.what, call.ranks, operation)
        if recorder is not None and recorder.action:
            recorder.note(kind, begin, call.label)

    def is_completed(self) -> bool:
        """Whether it is complete, or has failed; never waits."""
        if self._work is None:
            return True
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

    def finish(self) -> None:
        """Waits in another thread than the program's, whose waits alone are noted."""
        if self._work is not None:
            self._end(self._work)
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
        self._error = failed = self._failure(error, self._number)
        self._work = None
        raise failed from error

    def _failure(self, error: Exception, number: int = -1) -> CommError:
        call = self.call
        assert call is not None
        return failure(call.what, error, call.group.world, call.backend, number)

    def _finish(self) -> None:
        # Another thread takes the operation for complete once it has no work: that goes last.
        then, self._then = self._then, ()
        try:
            for one in then:
                one()
        except Exception as error:
            self._error = self._failure(error)
            raise self._error from error
        finally:
            self._work = None

    def _note(self, started: float) -> None:
        if self._log is not None:
            self._log.note(self._issue, started)
