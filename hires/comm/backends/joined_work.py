"""Joins works that are one operation: the messages of a collective, and what follows them."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hires.comm.backends.backend import Work


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
