"""Ranks have a core each or not, however their launcher has bound them."""

from __future__ import annotations

import pytest

from hires.comm.backends.mpi_cores import enough


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
