"""Are the steps of an engine in a loop of the user's those of plain torch, in every layout?"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.shard_jobs import plain_steps, steps_of_an_engine, wrong_engines

LAYOUTS = {
    "one rank": {},
    "tiles": {"tiles": [2, 1]},
    "stages in microbatches": {"stages": 2, "microbatches": 2},
    "tiles, then a stage": {"stages": 2, "tiles": [[2, 1], [1, 1]]},
    "replicas": {"replicas": 2},
    "gems": {"stages": 2, "directions": 2, "schedule": "gems"},
}
SIZES = [1, 2, 2, 3, 2, 2]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "size"), [*zip(LAYOUTS, SIZES, strict=True)])
def test_steps_are_those_of_plain_torch(name, size):
    losses, parameters = plain_steps()
    answers = run_ranks(steps_of_an_engine, size, LAYOUTS[name])
    held = set()
    for found, own in answers:
        assert found == pytest.approx(losses, rel=1e-10)
        for key, value in own.items():
            assert np.abs(value - parameters[key]).max() < 1e-10, (name, key)
            held.add(key)
    assert held == {*parameters}


REFUSED = [
    "this layout has 3 ranks, and the world has 2; start 3",
    "needs the keys image and batch",
    "unknown key imagee",
    "it takes model.channels alone",
    "a batch of [2, 3, 18, 16] with 2 targets",
    "a batch of [4, 3, 18, 16] with 2 targets",
]


@pytest.mark.dist
def test_wrong_calls_are_answered_with_the_remedy():
    for texts in run_ranks(wrong_engines, 2):
        for wanted, text in zip(REFUSED, texts, strict=True):
            assert wanted in text
