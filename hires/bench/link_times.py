"""Measures what messages take between two ranks of this machine, on the default route."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hires.bench.node_times import typical
from hires.bench.ranks import run_ranks
from hires.comm import all_gather_stacked, all_reduce_coalesced, barrier, irecv, isend, make_groups
from hires.plan.simulation.machine_calibration import Links

NUM_RANKS = 2
SMALL, LARGE = 256, 1 << 20
"""Numbers in a message whose time is latency, and in one whose time is bandwidth."""
GRADIENTS = 1 << 22
"""Numbers in a sum of gradients: those of a small network."""
ROUNDS, WARMUP = 60, 10
"""Of each measurement of a link."""


def measure_links(timeout_s: float, rounds: int = ROUNDS) -> Links:
    """Returns the links of this machine; RunError: a rank failed."""
    small_s, large_s, gather_s, reduce_s = run_ranks(_measure, NUM_RANKS, timeout_s, rounds)
    bytes_per_s = 4 * (LARGE - SMALL) / max(large_s - small_s, 1e-9)
    # Two ranks send each other half of the sum, and then the other half.
    reduce_bytes_per_s = 4 * GRADIENTS / max(reduce_s - 2 * small_s, 1e-9)
    return Links(small_s, bytes_per_s, gather_s, reduce_bytes_per_s)


def _measure(rank: int, rounds: int) -> tuple[float, float, float, float]:
    """Returns seconds of a small and a large message one way, a small gather, and a large sum."""
    group = make_groups([[*range(NUM_RANKS)]], 1)[0]

    def there_and_back(numbers: int) -> None:
        tensor = torch.zeros(numbers)
        for turn in range(NUM_RANKS):
            begin = isend if turn == rank else irecv
            begin(tensor, 1 - rank, tag=turn).wait()

    small = _typical_s(lambda: there_and_back(SMALL), rounds) / 2
    large = _typical_s(lambda: there_and_back(LARGE), rounds) / 2
    # A gather of as much as a normalisation of many channels needs.
    gather = _typical_s(lambda: all_gather_stacked(torch.zeros(SMALL), group), rounds)
    gradients = torch.zeros(GRADIENTS)
    added = _typical_s(lambda: all_reduce_coalesced([gradients], group), max(1, rounds // 4))
    return small, large, gather, added


def _typical_s(run: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(WARMUP + rounds):
        barrier()
        begin_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin_s)
    return typical(taken[WARMUP:])
