"""What started ranks do in tests of benchmarks, and rows as `hires bench comm` measures them."""

from __future__ import annotations

from importlib import import_module

import torch

from hires.bench import calibration_times
from hires.bench.start_ranks import join_world
from hires.comm import all_reduce, barrier, is_initialized, make_groups, shutdown
from hires.core.errors import CommError
from tests.helpers.ranks import run_ranks


def add_up_and_fail(world, number):
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


def all_values(world, job, *args):
    """Returns the values of a benchmark's job ``module:function``, on a rank."""
    torch.set_num_threads(1)
    calibration_times.ROUNDS, calibration_times.GRADIENTS = 4, 1 << 12
    module, _, name = job.partition(":")
    values = [*getattr(import_module(module), name)(world, *args)]
    if is_initialized():
        barrier()
        shutdown()
    return values


def forked(job, num_ranks, timeout_s, *args, **start):
    """Yields the values of a job on ranks that no command starts."""
    yield from run_ranks(all_values, num_ranks, job, *args)[0]


def rows_of(operation, num_bytes, medians, ranks=2, dtype="float32", near=2, noise=0.0, wrong=()):
    """Returns the rows of a measured cell."""
    cell = {"operation": operation, "num_bytes": num_bytes, "bytes": num_bytes, "dtype": dtype}
    cell |= {"ranks": ranks, "ranks_per_node": near, "device": "cpu", "bytes_per_s": (1e9, 1e9)}
    return [
        {
            **cell,
            "name": way,
            "step_s": {"median": seconds, "p99": seconds, "count": 3},
            "noise": noise,
            "ok": way not in wrong,
        }
        for way, seconds in medians.items()
    ]
