"""Random programs of all operations on real ranks, several backends at once, beside a reference."""

from __future__ import annotations

import random
import re

import pytest

from hires.comm.backends.known_backends import BACKENDS as KNOWN
from tests.helpers.mixed_programs import random_program, seed_bug
from tests.helpers.mixed_ranks import (
    BATCH,
    BATCHES,
    SMALL,
    STEPS,
    broken_of_rank,
    mixed_of_rank,
    sums_with_a_dead_rank,
)
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist
BACKENDS = tuple(name for name in ("gloo", "shm") if name in KNOWN)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_programs_give_the_reference_result(num_ranks: int):
    answers = run_ranks(mixed_of_rank, num_ranks, BACKENDS, range(12), 12, 2**20)
    assert answers == [12] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "first"), BATCHES)
def test_a_thousand_random_programs_give_the_reference_result(num_ranks: int, first: int):
    seeds = range(first, first + BATCH)
    answers = run_ranks(mixed_of_rank, num_ranks, BACKENDS, seeds, 12, 8 * 2**20, timeout_s=150)
    assert answers == [BATCH] * num_ranks


# Seeds at which the rank that is wrong and its calls are clear, with what an error must name.
@pytest.mark.parametrize(
    ("bug", "seed", "words"),
    [
        ("missing peer", 2, "to which rank 0 has not come"),
        ("wrong root", 0, "(root 1)"),
        pytest.param(
            *("opposite orders", 0, "in different orders"),
            marks=pytest.mark.skipif(len(BACKENDS) < 2, reason="needs two backends"),
        ),
    ],
)
def test_mistakes_are_named_with_both_lines_within_the_timeout(bug: str, seed: int, words: str):
    made = random_program(random.Random(seed), 2, BACKENDS, STEPS, SMALL)
    broken = seed_bug(random.Random(seed), made, bug)
    assert broken is not None
    answers = run_ranks(broken_of_rank, 2, BACKENDS, bug, seed)
    named = [answer for answer in answers if words in answer]
    assert named, answers
    for rank in (0, 1):
        assert f"rank {rank} " in named[0]
    assert named[0].count("program_rank.py:") >= 2


@pytest.mark.parametrize("bug", ["wrong size", "wrong type", "wrong reduction"])
def test_wrong_arguments_are_named_before_the_call_begins(bug: str):
    # gloo ends the process that gets more than it expects; other types may be wrong numbers alone.
    answers = run_ranks(broken_of_rank, 2, ("gloo",), bug, 0, "every")
    assert any("where rank" in answer and "program_rank.py:" in answer for answer in answers), (
        answers
    )


def test_rank_that_has_died_is_named():
    texts, _ = run_ranks(sums_with_a_dead_rank, 2, ("gloo", "shm"))
    for text in texts:
        assert re.search(r"rank 1 (has ended;|gives no answer: it has ended)", text)
        assert "mixed_ranks.py:" in text
