"""Random programs of all operations on real ranks, several backends at once, beside a reference."""

from __future__ import annotations

import pytest

from tests.helpers.mixed_programs import BATCH, BATCHES, run_programs
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist
BACKENDS = ("gloo", "shm")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_programs_give_the_reference_result(num_ranks: int):
    answers = run_ranks(run_programs, num_ranks, BACKENDS, range(12), 2**20)
    assert answers == [12] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "first"), BATCHES)
def test_a_thousand_random_programs_give_the_reference_result(num_ranks: int, first: int):
    seeds = range(first, first + BATCH)
    answers = run_ranks(run_programs, num_ranks, BACKENDS, seeds, 2**22, timeout_s=150)
    assert answers == [BATCH] * num_ranks
