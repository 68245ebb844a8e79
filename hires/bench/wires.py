"""Measures latency and bandwidth between two ranks of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from hires.bench.ranks import run_ranks
from hires.comm import Group, all_gather, barrier, irecv, isend, make_groups
from hires.plan.simulation.simulate import Link, Network

NUM_RANKS = 2
SMALL, LARGE = 256, 1 << 20
"""Numbers in a message whose time is latency, and in one whose time is bandwidth."""
ROUNDS, WARMUP = 60, 10


def measure_network(timeout_s: float) -> Network:
    """Returns the links of this machine, measured between two ranks.

    Raises:
        RunError: the ranks failed.
    """
    small_s, large_s, gather_s = run_ranks(_measure, NUM_RANKS, timeout_s)
    bytes_per_s = 4 * (LARGE - SMALL) / max(large_s - small_s, 1e-9)
    link = Link(small_s, bytes_per_s)
    return Network(near=link, far=link, small_latency_s=gather_s)


def _measure(rank: int) -> tuple[float, float, float]:
    """Returns seconds of a small and a large message one way, and of a small gather."""
    group = make_groups([[*range(NUM_RANKS)]], 1)[0]
    small = _median(lambda: _there_and_back(rank, SMALL)) / 2
    large = _median(lambda: _there_and_back(rank, LARGE)) / 2
    return small, large, _median(lambda: _gather(group))


def _there_and_back(rank: int, numbers: int) -> None:
    """Sends a message to the other rank and receives one of the same size."""
    tensor, other = torch.zeros(numbers), 1 - rank
    for turn in range(NUM_RANKS):
        begin = isend if turn == rank else irecv
        begin(tensor, other, turn).wait()


def _gather(group: Group) -> None:
    """Gathers as much as a normalisation of many channels does."""
    all_gather(torch.zeros(SMALL), group)


def _median(run: Callable[[], None]) -> float:
    """Returns the median seconds of a few runs."""
    taken = []
    for _ in range(WARMUP + ROUNDS):
        barrier()
        begin_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin_s)
    return statistics.median(taken[WARMUP:])
