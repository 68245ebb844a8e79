"""Is a module on tiles, or an engine, in a loop of the user's own, the plain module?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.library_jobs import refused, unchanged
from tests.helpers.pool import preload
from tests.helpers.ranks import run_ranks
from tests.helpers.shard_jobs import (
    plain_steps,
    refusals,
    several_calls,
    several_meshes,
    steps_of_an_engine,
    steps_on_images,
    train_beside_plain,
    two_default_groups,
    wrong_engines,
)

pytestmark = pytest.mark.dist
preload("tests.helpers.shard_jobs", "tests.helpers.library_jobs")

TRAININGS: dict[str, dict[str, Any]] = {
    "windows, and whole maps": {"net": "whole", "image": [16, 9], "mesh": [1, 2], "windows": True},
    "replicas of tiles whose norms are of a replica, frozen parameters, images of a subclass": {
        "net": "unet", "image": [20, 24], "mesh": [2, 2], "gather": "local", "windows": True,
        "frozen": 4, "noted": True,
    },
    "replicas of a network of classes": {
        "net": "preact_resnet", "image": [16, 20], "mesh": [2, 2],
    },
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tiles": {"tiles": [2, 1], "microbatches": 2},
    "gems": {"stages": 2, "directions": 2, "schedule": "gems"},
    "stages, of which the last one alone knows the loss": {"stages": 2, "microbatches": 2},
}
AUTOCAST = {"net": "unet", "image": [20, 24], "mesh": [1, 2], "autocast": True}
WRONG = {"shard": refusals, "uses": refused, "engine": wrong_engines}
JOBS: dict[str, tuple[Any, ...]] = {
    **{name: (train_beside_plain, case) for name, case in TRAININGS.items()},
    **{name: (steps_of_an_engine, layout) for name, layout in LAYOUTS.items()},
    **{name: (job,) for name, job in WRONG.items()},
    "autocast": (train_beside_plain, AUTOCAST),
    "reverse": (several_calls, "reverse", False),
    "joint": (several_calls, "joint", True),
    "unchanged": (unchanged,),
    "images": (steps_on_images,),
    "meshes of replicas": (several_meshes,),
}


def answers(name: str) -> list[Any]:
    """Returns what the job of a name returns on each rank."""
    return run_ranks(JOBS[name][0], 4 if "replicas" in name else 2, *JOBS[name][1:])


@pytest.mark.parametrize("name", TRAININGS)
def test_module_on_tiles_trains_as_the_plain_one(name):
    for found in answers(name):
        for what, error in found.items():
            assert error < 1e-10, (what, found)


def test_autocast_is_that_of_the_loop():
    for found in answers("autocast"):
        # Outputs are of norms, at most about 5, and bfloat16 rounds each of some ten layers to 2^-9
        # of its value: 5 * 10 * 2^-9 = 0.1. Gradients are of a mean, and smaller than the outputs.
        assert 0 < found["output"] < 0.15
        assert found["gradient"] < 0.1
        # AdamW moves a parameter by the rate at most, 1e-3, so that three steps differ by 6e-3.
        assert found["parameter"] < 1e-2


@pytest.mark.parametrize("order", ["reverse", "joint"])
def test_calls_may_wait_for_their_backward_passes(order):
    assert max(answers(order)) < 1e-12


def test_modules_on_tiles_of_several_meshes_and_an_engine_live_in_one_process():
    for found in answers("meshes of replicas"):
        assert max(found) < 1e-10


def test_tiles_have_the_numbers_of_the_group_that_torch_has_now(tmp_path):
    for found in run_ranks(two_default_groups, 2, str(tmp_path)):
        assert max(found) < 1e-10


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_and_what_tiles_cannot_do_are_answered_with_the_remedy(name):
    for texts in answers(name):
        assert [pair for pair in texts if pair[0] not in pair[1]] == []


def test_what_a_loop_does_with_a_module_is_unchanged():
    for rank in answers("unchanged"):
        for name, (ours, plain) in rank.items():
            if isinstance(plain, np.ndarray):
                assert ours == pytest.approx(plain, abs=1e-10), name
            else:
                assert ours == plain, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_an_engine_are_those_of_plain_torch(name):
    losses, parameters = plain_steps()
    held = set()
    for found, own in answers(name):
        assert found == pytest.approx(losses, rel=1e-10)
        for key, value in own.items():
            assert np.abs(value - parameters[key]).max() < 1e-10, (name, key)
            held.add(key)
    assert held == {*parameters}


def test_module_that_makes_images_of_its_inputs_size_learns():
    # It was refused, for want of model.scale=1, which an engine did not take.
    for found, plain in answers("images"):
        assert found == pytest.approx(plain, rel=1e-12)
