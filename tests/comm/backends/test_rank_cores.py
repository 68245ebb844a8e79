"""Ranks have a core each or not, however their launcher has bound them."""

from __future__ import annotations

import os

import pytest

from hires.comm.backends import counters, rank_cores
from hires.comm.backends.rank_cores import enough
from tests.helpers import shm_jobs
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ([0b01, 0b10], True),  # each bound to its own: they counted as crowded
        ([0b11, 0b11], True),
        ([0b1, 0b1], False),
        ([0b11, 0b11, 0b11], False),
        ([0b001, 0b001, 0b110], False),  # three cores, and two ranks share one
        ([0b001, 0b111, 0b111], True),
        ([0b0011, 0b0011, 0b1100, 0b1100], True),
    ],
)
def test_ranks_have_a_core_each(masks: list[int], expected: bool):
    assert enough(masks) is expected


def test_system_without_affinity_counts_all_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert rank_cores.of_ranks(lambda text: [text] * 4)
    assert not rank_cores.of_ranks(lambda text: [text] * 5)


@pytest.mark.dist
def test_waits_in_memory_follow_the_cores_of_all_ranks_together():
    # A rank bound to one core saw that alone, and two ranks with a core each counted as crowded.
    bound = counters.SPINS if len(os.sched_getaffinity(0)) > 1 else counters.CROWDED_SPINS
    found = run_ranks(shm_jobs.spins_of_bound_ranks, 2)
    assert found == [[bound, bound, counters.CROWDED_SPINS, counters.CROWDED_SPINS]] * 2
