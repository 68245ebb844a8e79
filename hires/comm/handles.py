"""Waits for operations of other ranks; an error names the operation and the other side."""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any

from hires.comm.comm_world import CommWorld, activity
from hires.comm.dispatch import Dispatch
from hires.comm.message_log import MessageLog
from hires.comm.sequence_check import ENDED_S, PATIENCE_S
from hires.core.errors import CommError, EndedError, PeerError
from hires.core.ranks.timeline import HALO
from hires.plan.traffic import CALLED

SHORTEST = datetime.timedelta(milliseconds=1)
_WRONG_ARGUMENT = re.compile("scalar type|ReduceOp|not supported|unsupported|not implemented")
_PLACE = re.compile(r"\[\S+:\d+\] ")
"""A line of a library's source, as gloo begins its texts with."""

FAILURES = (CommError, OSError, RuntimeError, ValueError)
"""What backends raise."""


def waiting(
    call: Callable[[], Any],
    what: str,
    world: CommWorld,
    ranks: Sequence[int],
    number: int = -1,
    operation: str = "",
) -> Any:
    """Returns what :func:`guard` does; meanwhile ``activity`` shows that the rank waits in it.

    ``ranks`` are all that come to it, with ``operation`` in a step.
    """
    outer = activity.begin(what, -1, -1, tuple(ranks), number, operation)
    try:
        return guard(call, what, world, number=number)
    finally:
        activity.end(outer)


def guard(
    call: Callable[[], Any], what: str, world: CommWorld, backend: str = "", number: int = -1
) -> Any:
    """Returns the result of a call; a failure of the backend becomes a ``CommError``."""
    try:
        return call()
    except FAILURES as error:
        raise failure(what, error, world, backend, number) from error


def failure(
    what: str, error: Exception, world: CommWorld, backend: str = "", number: int = -1
) -> CommError:
    """Returns the error of an operation that a backend failed with another one.

    ``number``: of the call that waited; what the other ranks call instead is added, unless the
    error is one of this rank alone.
    """
    what = f"{what} over {backend}" if backend else what
    reason = str(error)
    if not isinstance(error, CommError):
        reason = _in_short(reason) or type(error).__name__
    why, check = "", world.check
    if check is not None:
        check.has_failed = True
    if number >= 0 and check is not None and is_of_peer(error):
        # One that has ended gives no answer, for which the others would be waited for in vain.
        ended = error.ranks if isinstance(error, EndedError) else ()
        patience_s = ENDED_S if isinstance(error, EndedError) else PATIENCE_S
        why = check.reason(number, patience_s, ended)
    return CommError(f"{what} failed: {reason}" + (f"; {why}" if why else ""))


def _in_short(text: str) -> str:
    # The first line of a library's text without what only its own developers need: of gloo the
    # line of its source and the advice, of MPICH the heading of its stack.
    line = text.strip().partition("\n")[0]
    if place := _PLACE.match(line):
        line = line[place.end() :].partition(". ")[0]
    return line.removesuffix(", error stack:")[:300]


def is_of_peer(error: Exception) -> bool:
    """Whether another rank may be the cause: it is late, has ended, or calls something else."""
    if isinstance(error, PeerError | OSError):
        return True
    if isinstance(error, CommError | ValueError | NotImplementedError):
        return False
    # Of libraries: RuntimeErrors, whatever the cause.
    return _WRONG_ARGUMENT.search(str(error)) is None


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
            if timeout is None:
                raise self._failed(error) from error
            raise failure(call.what, error, world, call.backend, self._number) from error
        finally:
            activity.end(outer)
        self._finish()
        if self._log is not None:
            self._log.note(self._issue, started)
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
                raise self._failed(error) from error
            started = clock()
            self._end()
            if self._log is not None:
                self._log.note(self._issue, started)
        return True

    def exception(self) -> CommError | None:
        """Returns why it failed; None: it has not, so far."""
        self.is_completed()
        return self._error

    def finish(self) -> None:
        """Waits in another thread than the program's, whose waits alone are noted."""
        if self._work is not None:
            self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        # Waits for what is complete, or in a thread: without a note of what the rank waits in.
        try:
            self._work.wait()
        except Exception as error:
            raise self._failed(error) from error
        self._finish()

    def _failed(self, error: Exception, number: int | None = None) -> CommError:
        call, number = self.call, self._number if number is None else number
        assert call is not None
        self._error = failure(call.what, error, call.group.world, call.backend, number)
        self._work = None
        return self._error

    def _finish(self) -> None:
        # Another thread takes the operation for complete once it has no work: that goes last.
        then, self._then = self._then, ()
        try:
            for one in then:
                one()
        except Exception as error:
            raise self._failed(error, -1) from error
        finally:
            self._work = None
