"""Threads that know when all of them are blocked, so that a deadlock is told at once.

A thread that blocks says what it waits for, and whoever changes something wakes those whose wait is
over, so when all threads block nobody is left to wake them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

HARD_TIMEOUT_S = 60.0
"""Longer than any program runs: only a mistake in this file is ever caught by it."""

Condition = Callable[[], bool]


class AllBlockedError(Exception):
    """All threads are blocked."""


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
        """Starts a thread; the caller holds the lock."""

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
        """Wakes the threads whose wait is over."""
        for condition in [c for c, over in self.waiting.items() if over()]:
            del self.waiting[condition]
            condition.notify()

    def _stop_if_all_wait(self) -> None:
        """Ends the execution if nobody is left to change anything."""
        if self.num_live and len(self.waiting) == self.num_live:
            self._stop()

    def _stop(self) -> None:
        """Wakes all threads for their end."""
        self.stopped = True
        for condition in self.waiting:
            condition.notify()
