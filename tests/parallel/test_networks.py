"""Every network computes in every kind of layout what one process computes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from hires.plan.partition import layer_starts
from tests.helpers.graphs import cut_values
from tests.helpers.layouts import config_of, plan_of, verified
from tests.helpers.traces import graph_of

pytestmark = pytest.mark.dist

NETWORKS: dict[str, dict[str, Any]] = {
    "amoebanet": {"model": {"name": "amoebanet", "layers": 3, "filters": 8, "classes": 4}},
    "mpi4dl_resnet": {"model": {"name": "mpi4dl_resnet", "n": 1, "classes": 4}},
    "mpi4dl_resnet flatten": {
        "model": {"name": "mpi4dl_resnet", "n": 1, "head": "flatten", "classes": 4}
    },
    # Its last map is a 32nd of the image. Of one pixel, norms divide by next to nothing.
    "inception_bn": {"image": [99, 70], "model": {"name": "inception_bn", "classes": 4}},
    "unet": {"model": {"name": "unet", "levels": 3, "width": 4, "classes": 4}},
    "unet bilinear": {
        "model": {
            "name": "unet",
            "levels": 3,
            "width": 4,
            "upsample": "bilinear",
            "classes": 4,
        }
    },
    "unet nearest": {
        "model": {"name": "unet", "levels": 2, "width": 4, "upsample": "nearest", "classes": 4}
    },
    "edsr x2": {"model": {"name": "edsr", "blocks": 2, "width": 4}},
    "edsr x3": {"model": {"name": "edsr", "blocks": 2, "width": 4, "scale": 3, "res_scale": 0.1}},
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "sp rows": {"tiles": [2, 1]},
    "sp columns": {"tiles": [1, 3]},
    "sp grid": {"tiles": [2, 2]},
    "lp": {"stages": 3},
    "sp+lp": {"tiles": [2, 1], "stages": 3, "spatial_stages": 1},
}


def check(folder: Path, **keys: Any) -> None:
    answer = verified(folder, **keys)
    assert answer["ok"], answer
    assert answer["max_rel_err"] < 1e-10


FAST = [
    *(("amoebanet", "sp grid"), ("unet", "sp+lp"), ("unet bilinear", "sp columns")),
    *(("mpi4dl_resnet flatten", "sp grid"), ("inception_bn", "sp+lp")),
    *(("unet nearest", "lp"), ("edsr x2", "sp rows"), ("edsr x3", "sp grid"), ("edsr x2", "sp+lp")),
]
"""Every network and every layout once; the other combinations are slow together."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("network", "layout"), FAST)
def test_network_equals_one_process(network: str, layout: str, tmp_path: Path):
    check(tmp_path, parallel=LAYOUTS[layout], **{"image": [37, 41], **NETWORKS[network]})


@pytest.mark.parametrize(
    "keys",
    [
        {"parallel": {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2}},
        {"parallel": {"replicas": 2, "stages": 2, "directions": 2, "schedule": "gems"}},
    ],
)
def test_buffers_that_the_forward_pass_writes_equal_those_of_one_process(keys, tmp_path):
    # Each microbatch updates them in turn, replica by replica, also where it is computed again.
    model = {"name": "custom", "target": "tests.helpers.custom_nets:Spectral"}
    check(tmp_path, batch=8, model=model, memory={"checkpoint": "block"}, **keys)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_equals_one_process_in_every_layout(
    network: str, layout: str, tmp_path: Path
):
    check(tmp_path, parallel=LAYOUTS[layout], **{"image": [37, 41], **NETWORKS[network]})


@pytest.mark.slow
@pytest.mark.parametrize("network", ["amoebanet", "unet", "edsr x3"])
def test_network_equals_one_process_with_everything_at_once(network: str, tmp_path: Path):
    parallel = {
        "tiles": [1, 2],
        "stages": 3,
        "spatial_stages": 2,
        "microbatches": 2,
        "schedule": "1f1b",
    }
    # Two images a microbatch: over the last map of 2x2 pixels of one image, norms divide by so
    # little that rounding grows to 1e-9.
    check(tmp_path, image=[49, 38], batch=4, parallel=parallel, **NETWORKS[network])


@pytest.mark.slow
@pytest.mark.parametrize("network", ["amoebanet", "unet bilinear", "edsr x2"])
def test_inference_equals_one_process(network: str, tmp_path: Path):
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 2}
    check(tmp_path, image=[21, 26], task={"name": "infer"}, parallel=parallel, **NETWORKS[network])


def test_replicas_learn_from_pairs(tmp_path: Path):
    parallel = {"tiles": [2, 1], "replicas": 2}
    check(tmp_path, image=[13, 10], parallel=parallel, **NETWORKS["edsr x2"])


def test_custom_network_learns_from_pairs(tmp_path: Path):
    model = {"name": "custom", "target": "tests.helpers.custom_nets:sharpener", "scale": 1}
    check(tmp_path, image=[13, 10], parallel={"tiles": [3, 1]}, model=model, loss={"name": "l1"})


def test_state_and_skip_and_nothing_else_cross_a_cut_between_two_cells(tmp_path: Path):
    keys: dict[str, Any] = {"image": [37, 41], **NETWORKS["amoebanet"]}
    graph = graph_of(config_of(**keys))
    starts = layer_starts(graph)
    crossing = [[graph.by_name[name].layer for name in cut_values(graph, i)] for i in starts]
    cells = [index for index, layers in enumerate(crossing) if _are_cells(layers)]
    assert [crossing[index] for index in cells] == [
        [f"cells.{number}", f"cells.{number + 1}"] for number in range(4)
    ]
    cuts = [0, cells[1], cells[3], len(starts)]
    balance = [last - first for first, last in itertools.pairwise(cuts)]
    keys["parallel"] = {"stages": 3, "balance": balance}
    edges = [(e.source, e.target) for e in plan_of(config_of(**keys)).edges]
    assert edges == [(0, 1), (0, 1), (1, 2), (1, 2)]
    check(tmp_path, **keys)


def _are_cells(layers: list[str]) -> bool:
    """Whether values are what two cells return."""
    return len(layers) == 2 and all(layer.count(".") == 1 and "cells" in layer for layer in layers)
