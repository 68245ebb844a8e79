"""However tiles get their halos, they compute what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import verified

pytestmark = pytest.mark.dist

ZOO = {
    "image": [37, 41],
    "model": {"name": "custom", "target": "tests.helpers.custom_nets:zoo"},
    "data": {"classes": 5, "length": 16},
}
SLIM = {"name": "custom", "target": "tests.helpers.custom_nets:slim_resnet"}
BASIC = {"image": [75, 61], "model": SLIM}


CELLS = {**ZOO, "model": {"name": "custom", "target": "tests.helpers.custom_nets:cells"}}


def check(folder: Path, tiles: list[int], halo: dict[str, Any], **keys: Any) -> None:
    answer = verified(folder, **keys, parallel={"tiles": tiles, "halo": halo})
    assert answer["ok"], answer
    assert answer["max_rel_err"] < 1e-10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("net", [ZOO, BASIC], ids=["zoo", "resnet"])
@pytest.mark.parametrize("tiles", [[2, 1], [1, 3], [2, 2]])
def test_interior_while_the_halo_travels(net: dict[str, Any], tiles: list[int], tmp_path: Path):
    check(tmp_path, tiles, {"overlap": "on"}, **net)


@pytest.mark.slow
def test_interior_of_tiles_with_eight_neighbours(tmp_path: Path):
    check(tmp_path, [3, 3], {"overlap": "on"}, **{**BASIC, "image": [61, 67]})


def test_halo_first(tmp_path: Path):
    check(tmp_path, [2, 2], {"overlap": "off"}, **ZOO)


@pytest.mark.parametrize(("tiles", "overlap"), [([3, 1], "on"), ([2, 2], "auto")])
def test_branches_that_share_their_halo(tiles: list[int], overlap: str, tmp_path: Path):
    check(tmp_path, tiles, {"overlap": overlap}, **CELLS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("net", [ZOO, BASIC, CELLS], ids=["zoo", "resnet", "cells"])
@pytest.mark.parametrize(
    ("tiles", "fuse", "overlap"),
    [([2, 1], 2, "auto"), ([1, 3], 3, "off"), ([2, 2], 2, "on")],
)
def test_one_exchange_for_several_layers(
    net: dict[str, Any], tiles: list[int], fuse: int, overlap: str, tmp_path: Path
):
    check(tmp_path, tiles, {"fuse": fuse, "overlap": overlap}, **net)


@pytest.mark.slow
def test_fused_layers_of_tiles_with_eight_neighbours(tmp_path: Path):
    check(tmp_path, [3, 3], {"fuse": 3, "overlap": "on"}, **{**BASIC, "image": [67, 71]})


@pytest.mark.slow
def test_fused_bottlenecks_and_preactivated_blocks(tmp_path: Path):
    bottlenecks = {"model": {**SLIM, "args": {"depth": 50}}, "image": [75, 61]}
    check(tmp_path, [2, 1], {"fuse": 3}, **bottlenecks)
    preact = {"model": {"name": "preact_resnet", "n": 2, "classes": 4}, "image": [29, 31]}
    check(tmp_path, [2, 2], {"fuse": 2}, **preact)


@pytest.mark.parametrize("task", ["train", "infer"])
def test_fused_layers_in_two_spatial_stages(task: str, tmp_path: Path):
    stages = {"stages": 3, "spatial_stages": 2, "microbatches": 2, "schedule": "1f1b"}
    parallel = {"tiles": [2, 1], "halo": {"fuse": 3, "overlap": "on"}, **stages}
    answer = verified(tmp_path, **ZOO, task={"name": task}, parallel=parallel)
    assert answer["ok"], answer


@pytest.mark.parametrize("checkpoint", ["stage", "block"])
def test_fused_and_shared_halos_that_are_exchanged_again(checkpoint: str, tmp_path: Path):
    halo = {"fuse": 2, "overlap": "on"}
    check(tmp_path, [2, 1], halo, **BASIC, memory={"checkpoint": checkpoint})
    check(tmp_path, [1, 2], {"overlap": "on"}, **CELLS, memory={"checkpoint": checkpoint})


def test_fused_halos_in_both_directions(tmp_path: Path):
    spatial = {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "directions": 2}
    parallel = {**spatial, "schedule": "gems", "halo": {"fuse": 2, "overlap": "on"}}
    answer = verified(tmp_path, **BASIC, parallel=parallel, batch=4)
    assert answer["ok"], answer
