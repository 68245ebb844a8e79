"""Is a module on tiles, in a loop of the user's own, the plain module?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hires
from hires.core.errors import ConfigError
from tests.helpers.library_jobs import USES, refused, unchanged
from tests.helpers.ranks import run_ranks
from tests.helpers.shard_jobs import refusals, several_calls, train_beside_plain

CASES = {
    "three uneven bands": {"net": "whole", "image": [20, 13], "mesh": [1, 3]},
    "windows, and whole maps": {"net": "whole", "image": [16, 9], "mesh": [1, 2], "windows": True},
    "replicas of tiles whose norms are of a replica": {
        "net": "unet", "image": [20, 24], "mesh": [2, 2], "gather": "local", "windows": True,
    },
    "replicas of a network of classes": {
        "net": "preact_resnet", "image": [16, 20], "mesh": [2, 2],
    },
    "replicas with frozen parameters, images of a subclass": {
        "net": "unet", "image": [20, 24], "mesh": [2, 2], "frozen": 4, "noted": True,
    },
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_module_on_tiles_trains_as_the_plain_one(name):
    case = CASES[name]
    size = 1
    for one in case["mesh"]:
        size *= one
    for found in run_ranks(train_beside_plain, size, case):
        for what, error in found.items():
            assert error < 1e-10, (name, what, found)


@pytest.mark.dist
def test_autocast_is_that_of_the_loop():
    case = {"net": "unet", "image": [20, 24], "mesh": [1, 2], "autocast": True}
    for found in run_ranks(train_beside_plain, 2, case):
        # Outputs are of norms, at most about 5, and bfloat16 rounds each of some ten layers to 2^-9
        # of its value: 5 * 10 * 2^-9 = 0.1. Gradients are of a mean, and smaller than the outputs.
        assert 0 < found["output"] < 0.15
        assert found["gradient"] < 0.1
        # AdamW moves a parameter by the rate at most, 1e-3, so that five steps differ by 2 * 5e-3.
        assert found["parameter"] < 1e-2


@pytest.mark.dist
@pytest.mark.parametrize(("order", "freezes"), [("reverse", False), ("joint", True)])
def test_calls_may_wait_for_their_backward_passes(order, freezes):
    for difference in run_ranks(several_calls, 2, order, freezes):
        assert difference < 1e-12


REFUSED = [
    "gather='all' is unknown; choose one of full, local",
    "are not the 2 ranks of the mesh; use tiles=[2,1]",
    "slice it, as mesh['tiles']",
    "use (n, C, H, W)",
    "its control flow depends on the values of tensors",
    "keep them in float32, under torch.autocast",
    "use at most 1, or a larger image",
    "use images.detach()",
    "neither whole images of size=[16, 16] nor this rank's window, 8x16",
    "use float32",
    "images of type DTensor hold no numbers of their own; give a plain tensor",
]


@pytest.mark.dist
def test_wrong_calls_are_answered_with_the_remedy():
    for texts in run_ranks(refusals, 2):
        for wanted, text in zip(REFUSED, texts, strict=True):
            assert wanted in text


def test_mesh_that_is_none_is_named_with_the_remedy():
    # It was an AttributeError: 'NoneType' object has no attribute 'mesh'.
    for call in (
        lambda: hires.shard(nn.Conv2d(3, 4, 3), None, example=torch.zeros(1, 3, 8, 8)),
        lambda: hires.window((8, 8), None),
    ):
        with pytest.raises(ConfigError, match=r"the mesh is None, no device mesh .* torchrun"):
            call()


@pytest.mark.dist
def test_what_a_loop_does_with_a_module_is_unchanged():
    for answers in run_ranks(unchanged, 2):
        for name, (ours, plain) in answers.items():
            if isinstance(plain, np.ndarray):
                assert ours == pytest.approx(plain, abs=1e-10), name
            else:
                assert ours == plain, name


@pytest.mark.dist
def test_what_tiles_cannot_do_is_refused_with_the_remedy():
    for answers in run_ranks(refused, 2):
        assert answers.keys() == USES.keys()
        for name, (_, word) in USES.items():
            assert word in answers[name], (name, answers[name])
