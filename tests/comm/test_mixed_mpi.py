"""Random programs over gloo and an MPI at once, and their mistakes, on real ranks of mpirun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hires.core.ranks import ports
from tests.helpers.mixed_ranks import (
    BATCH,
    BATCHES,
    broken_in_meetings,
    broken_over_mpi,
    mixed_over_mpi,
    small_messages_of_rank,
)
from tests.helpers.mpi_ranks import run_mpi

pytestmark = pytest.mark.mpi
BOTH = ("gloo", "mpi")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_programs_give_the_reference_result(mpi: str, num_ranks: int, tmp_path: Path):
    with ports.reserve(0) as port:
        job = (port, BOTH, range(12), 12, 2**20)
        answers = run_mpi(mpi, mixed_over_mpi, num_ranks, *job, folder=tmp_path)
    assert answers == [12] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "first"), BATCHES)
def test_a_thousand_random_programs(mpi: str, num_ranks: int, first: int, tmp_path: Path):
    with ports.reserve(0) as port:
        job = (port, BOTH, range(first, first + BATCH), 12, 8 * 2**20)
        answers = run_mpi(mpi, mixed_over_mpi, num_ranks, *job, folder=tmp_path, timeout_s=150)
    assert answers == [BATCH] * num_ranks


def test_opposite_orders_on_gloo_and_mpi_are_named_with_both_lines(mpi: str, tmp_path: Path):
    with ports.reserve(0) as port:
        job = (port, BOTH, "opposite orders", 0)
        answers = run_mpi(mpi, broken_over_mpi, 2, *job, folder=tmp_path)
    named = [answer for answer in answers if "in different orders" in answer]
    assert named, answers
    for backend in BOTH:  # by its own algorithm, or another one
        assert re.search(rf"over {backend}(:\S+)? at program_rank\.py:\d+,", named[0]), named[0]


@pytest.mark.parametrize("bug", ["wrong root", "wrong size", "wrong reduction"])
def test_mistakes_in_calls_that_block_end_in_time(mpi: str, bug: str, tmp_path: Path):
    with ports.reserve(0) as port:
        job = (port, bug, 3)
        answers = run_mpi(mpi, broken_in_meetings, 2, *job, folder=tmp_path, timeout_s=90)
    assert any(answers)


def test_small_messages_leave_while_their_receiver_waits_in_another_library(
    mpi: str, tmp_path: Path
):
    """Open MPI completes a send of more than 256 bytes when the receiver calls MPI, not before."""
    with ports.reserve(0) as port:
        answers = run_mpi(mpi, small_messages_of_rank, 2, port, folder=tmp_path)
    assert answers == [307, 307]
