"""What ranks do in tests of the pool."""

from __future__ import annotations

import os
import signal
import time

from hires.core.ranks.world import World

POOLED = True


def process_id(world: World) -> int:
    return os.getpid()


def fails(world: World, how: str) -> int:
    """Fails on rank 1: it raises, is killed, or gives no answer; the others wait for ever."""
    if world.rank == 1 and how == "raises":
        raise ValueError("an error of rank 1")
    if world.rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
    return 0


def changes_environment(world: World) -> int:
    os.environ["LEFT_BEHIND"] = "1"
    return os.getpid()
