"""What started ranks do in tests of the benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hires.bench import calibration_chains
from hires.bench.start_ranks import join_world
from hires.comm import all_reduce, barrier, make_groups, shutdown
from hires.core.errors import CommError
from hires.core.ranks.world import World


def add_up_and_fail(world: World, number: int) -> Iterator[float]:
    """Yields a number, and the sum of what all ranks add to it; then the last rank fails."""
    yield float(number)
    join_world(world, 60.0)
    total = torch.tensor([float(number + world.rank)])
    all_reduce(total, group=make_groups([[*range(world.size)]])[0])
    yield float(total)
    barrier()
    if world.rank == world.size - 1:
        raise CommError("rank of no use")
    while True:
        pass


def sleep(world: World, folder: str) -> Iterator[None]:
    """Notes the process and sleeps."""
    Path(folder, f"{world.rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)
    yield None


def last_value(world: World, job: str, *args: Any) -> Any:
    """Returns the last value of a benchmark's job ``module:function``, on a rank."""
    torch.set_num_threads(1)
    calibration_chains.PACE = len(calibration_chains.CHAINS) - 2  # a network of milliseconds
    module, _, name = job.partition(":")
    *_, value = getattr(import_module(module), name)(world, *args)
    barrier()
    shutdown()
    return value
