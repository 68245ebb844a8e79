"""Waits for what another rank does: first busily, then with the core offered, then asleep.

    looks at once      the other rank answers within microseconds if it has a core of its own
    offers its core    the system may have put the other rank behind this one there
    sleeps             a rank that waits for minutes leaves the core to others

What is waited for, and how a rank sleeps, is the caller's: a futex where the other rank shares
memory (:mod:`.counters`), else a pause.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable


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
