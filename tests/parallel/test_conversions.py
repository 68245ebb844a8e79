"""Values that tiles gather and crop are those of one process: real ranks, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hires.parallel.conversion_kernels import usual_strides
from tests.helpers.layouts import verified

pytestmark = pytest.mark.dist

IMAGE = [13, 10]
MODEL = {"name": "custom", "target": "tests.helpers.token_nets:attends"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "two tiles": {"tiles": [1, 2]},
    "grid": {"tiles": [2, 2]},
    "sp+gems": {
        "tiles": [2, 1],
        "stages": 2,
        "directions": 2,
        "schedule": "gems",
        "balance": [5, 2],
    },
    "empty tiles": {"tiles": [1, 6]},
    "skip over a stage": {"tiles": [2, 1], "stages": 3, "spatial_stages": 2, "balance": [1, 4, 2]},
}


def check(folder: Path, dense: bool = False, **keys: Any) -> None:
    model = {**MODEL, "args": {"size": IMAGE, "dense": dense}}
    answer = verified(folder, image=IMAGE, model=model, data={"classes": 5, "length": 16}, **keys)
    assert answer["ok"], answer


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gathered_values_equal_one_process(name: str, tmp_path: Path):
    check(tmp_path, batch=4, parallel=LAYOUTS[name])


def test_gathered_values_that_are_computed_again(tmp_path: Path):
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 2, "balance": [1, 6]}
    check(tmp_path, memory={"checkpoint": "block"}, parallel=parallel)


def test_gathered_values_with_fused_halos_and_over_the_network(tmp_path: Path):
    halo = {"fuse": 2, "overlap": "on"}
    check(tmp_path, True, comm={"shared_memory": False}, parallel={"tiles": [1, 2], "halo": halo})


def test_gathered_values_in_inference(tmp_path: Path):
    check(tmp_path, dense=True, task={"name": "infer"}, parallel={"tiles": [2, 2]})


SHARDS: dict[str, dict[str, Any]] = {
    "shards": {"local_dp": 2},
    "tiles and shards": {"tiles": [2, 1], "stages": 3, "local_dp": 2},
    "gems": {"tiles": [2, 1], "stages": 2, "local_dp": 2, "directions": 2, "schedule": "gems"},
}


@pytest.mark.parametrize("name", SHARDS)
def test_samples_that_depend_on_each_other_equal_one_process(name: str, tmp_path: Path):
    # Four samples and four channels: a mean over the samples looks like one number a sample.
    model = {"name": "custom", "target": "tests.helpers.token_nets:mixes_samples"}
    keys = {"image": [6, 5], "model": model, "data": {"classes": 5, "length": 16}}
    batch = 4 * SHARDS[name].get("directions", 1)
    answer = verified(tmp_path, batch=batch, parallel=SHARDS[name], **keys)
    assert answer["ok"], answer


def test_gradient_of_one_sample_has_the_strides_of_a_channels_last_map():
    # After a reshape the samples had a stride of 6, and batch norm mixed the channels of such a
    # gradient: no network of one sample was right where tiles cropped a norm of a whole map.
    grad = (
        torch.randn(9, 8, 6, dtype=torch.float64)
        .permute(2, 0, 1)
        .as_strided((1, 6, 9, 8), (6, 1, 48, 6))
    )
    x, bias = torch.randn(1, 6, 9, 8, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    bias.requires_grad_()
    y = F.batch_norm(x, None, None, torch.ones_like(bias), bias, training=True)
    y.backward(usual_strides(grad))
    assert usual_strides(grad).stride() == (432, 1, 48, 6)
    assert bias.grad is not None
    assert torch.allclose(bias.grad, grad.sum((0, 2, 3)))
