"""Threads that wait for what a library can only wait for; one that is free takes the next call.

A call may wait for long, so none stands behind another: there are as many threads as calls that
wait at one time, not one for each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

IDLE_S = 5.0
"""A thread that was free for so long ends."""


class WaitingThreads:
    """Some threads, and the calls for them."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self.num_busy = 0
        """Calls that have not returned."""
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_free = 0  # threads that wait for a call, less the calls that lie in the queue

    def run(self, call: Callable[[], None]) -> None:
        """Runs a call, which raises nothing, in a thread; returns at once.

        RuntimeError: the system has no more threads; the call does not run.
        """
        with self._lock:
            if self._num_free:
                self._num_free -= 1
            else:
                threading.Thread(target=self._run, name="comm-wait", daemon=True).start()
            self.num_busy += 1
            self._calls.put(call)

    def drain(self, limit_s: float) -> None:
        """Returns when no call is under way any more, or after the limit."""
        with self._lock:
            self._lock.wait_for(lambda: self.num_busy == 0, limit_s)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._num_free:
                        self._num_free -= 1
                        return
                continue  # a call was put for this thread just now
            try:
                call()
            finally:
                del call  # with the tensors that it holds
                with self._lock:
                    self.num_busy -= 1
                    self._lock.notify_all()
            with self._lock:
                self._num_free += 1


threads = WaitingThreads()
"""Those of this process."""
