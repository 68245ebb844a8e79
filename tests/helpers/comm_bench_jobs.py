"""What started ranks do in tests of the benchmarks of messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from hires.bench.message_operations import BENCHED, BenchBuffers, bind
from hires.bench.message_race import BenchCell, RacePlan, RaceWorld, race_cell, timed
from hires.bench.raw_mpi import RawMpi
from hires.core.errors import CommError
from hires.core.ranks.world import World


def raw_libraries(world: World, with_mpi: bool) -> Iterator[dict[str, Any]]:
    """Yields every operation of two sizes through the libraries without hires."""
    place = f"tcp://{world.address}:{world.port}"
    dist.init_process_group("gloo", place, rank=world.rank, world_size=world.size)
    agreed = RaceWorld(
        world.rank, world.size, dist.barrier, lambda t: dist.all_reduce(t, dist.ReduceOp.MAX)
    )

    def gloo(buffers: BenchBuffers, blocking: bool) -> Any:
        return timed(bind(dist, buffers, blocking), agreed)

    ways: dict[str, Any] = {"gloo": gloo}
    if with_mpi:
        raw = RawMpi()
        ways["mpi4py"] = lambda buffers, blocking: timed(raw.bind(buffers, blocking), agreed)
    for name in BENCHED:
        for blocking in (True, False):
            yield race_cell(
                BenchCell(name, 3000, blocking=blocking), ways, agreed, RacePlan(1, 1e-9)
            )
    dist.destroy_process_group()
    if with_mpi:
        raw.mpi.Finalize()


def failing(world: World) -> Iterator[str]:
    """Yields a word, then fails on the last rank, for which the first waits."""
    yield "a word"
    if world.rank == world.size - 1:
        raise CommError("rank of no use")
    while True:
        pass
