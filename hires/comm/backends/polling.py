"""Waits for another process by looking again and again: first busily, then ever more rarely."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PAUSE_S = 1e-4  # between two looks of a rank that waits for long
LONG = 4  # so many times the first looks come before those with a pause


def poll(done: Callable[[], bool], timeout_s: float, spins: int, busy_s: float = 0.0) -> bool:
    """Returns True once ``done()`` does, or False after ``timeout_s`` seconds and a last look.

    The first ``spins`` looks follow each other at once. Then the core is offered to other processes
    between two looks, for the other rank may need it. Later, and not before ``busy_s``, this one
    sleeps in between, so that a rank that waits for minutes leaves the core to others.
    """
    looks, begin_s = 0, 0.0
    while not done():
        looks += 1
        if looks < spins:
            continue
        os.sched_yield()
        if looks == spins:
            begin_s = time.monotonic()
            continue
        waited_s = time.monotonic() - begin_s
        if waited_s > timeout_s:
            return done()  # this process may have been stopped since the look before
        if looks > LONG * spins and waited_s > busy_s:
            time.sleep(PAUSE_S)
    return True
