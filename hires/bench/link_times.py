"""Measures what messages take between two ranks of this machine, on the default route."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from hires.bench.node_times import typical
from hires.bench.start_ranks import join_world, run_ranks
from hires.comm import all_gather_stacked, all_reduce_coalesced, barrier, irecv, isend, make_groups
from hires.core.ranks import memory_files
from hires.core.ranks.world import World
from hires.plan.hardware import GLOO
from hires.plan.routes import MEMORY
from hires.plan.simulation.machine_calibration import Links

SMALL, LARGE, GRADIENTS = 256, 1 << 20, 1 << 22
"""Elements of a message whose time is latency, of one whose time is bandwidth, and of a sum of the
gradients of a small network."""
ROUNDS, WARMUP = 60, 10
"""Of each measurement of a link; four times as many for a mean, which one disturbance spoils."""
IN_A_ROW = 10
"""Exchanges of one sample. Inside a step an exchange takes as long as in the mean, which on a busy
machine is several times what the fastest one takes."""


def measure_links(timeout_s: float) -> Links:
    """Returns the links of this machine; RunError: a rank failed."""
    return Links(*run_ranks(f"{__name__}:time_links", 2, timeout_s, timeout_s))


def time_links(world: World, timeout_s: float) -> Iterator[list[float]]:
    """Yields what :class:`Links` holds, as two ranks measure it together."""
    backends = [GLOO, *MEMORY] if memory_files.is_supported() else [GLOO]
    join_world(world, timeout_s, backends)
    group, gradients = make_groups([[0, 1]], 1)[0], torch.zeros(GRADIENTS)

    def exchange(elements: int) -> None:
        """Sends and receives at once, as two tiles exchange their halos."""
        received = irecv(torch.zeros(elements), 1 - world.rank, tag=0)
        sent = isend(torch.zeros(elements), 1 - world.rank, tag=0)
        received.wait()
        sent.wait()

    def exchanges() -> None:
        for _ in range(IN_A_ROW):
            exchange(SMALL)

    def gathers() -> None:
        """Gathers as much as a normalisation of many channels needs."""
        for _ in range(IN_A_ROW):
            all_gather_stacked(torch.zeros(SMALL), group)

    def add_up() -> None:
        all_reduce_coalesced([gradients], group, backend=backends[-1])

    small_s = typical(_seconds(lambda: exchange(SMALL), ROUNDS))
    large_s = typical(_seconds(lambda: exchange(LARGE), ROUNDS))
    sum_s = typical(_seconds(add_up, ROUNDS // 4))
    latency_s, gather_s = (
        statistics.median(_seconds(run, 4 * ROUNDS)) / IN_A_ROW for run in (exchanges, gathers)
    )
    bytes_per_s = 4 * (LARGE - SMALL) / max(large_s - small_s, 1e-9)
    # Two ranks send each other half of the sum, and then the other half.
    yield [latency_s, bytes_per_s, gather_s, 4 * GRADIENTS / max(sum_s - 2 * small_s, 1e-9)]


def _seconds(run: Callable[[], object], rounds: int) -> list[float]:
    """Returns the seconds of calls that both ranks begin together."""
    seconds = []
    for _ in range(WARMUP + rounds):
        barrier()
        begin_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin_s)
    return seconds[WARMUP:]
