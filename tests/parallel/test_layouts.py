"""Every layout computes what one process computes: real ranks, float64, the user's plain module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import verified

pytestmark = pytest.mark.dist

ZOO = {"name": "custom", "target": "tests.helpers.custom_nets:zoo"}
ZOO_DATA = {"classes": 5, "length": 16}


def check(folder: Path, **keys: Any) -> None:
    answer = verified(folder, **keys)
    assert answer["ok"], answer
    assert answer["max_rel_err"] < 1e-10


LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "single with microbatches": {"microbatches": 2},
    "dp": {"replicas": 2},
    "dp with microbatches": {"replicas": 2, "microbatches": 2},
    "lp": {"stages": 2},
    "pp gpipe": {"stages": 3, "microbatches": 4},
    "pp 1f1b": {"stages": 3, "microbatches": 4, "schedule": "1f1b"},
    "pp balance": {"stages": 2, "microbatches": 2, "balance": [3, 11]},
    "sp rows": {"tiles": [3, 1]},
    "sp cols": {"tiles": [1, 3]},
    "sp grid": {"tiles": [2, 2], "microbatches": 2},
    "sp dp": {"tiles": [1, 2], "replicas": 2},
    "sp+lp": {"tiles": [2, 1], "stages": 2, "spatial_stages": 1},
    "sp+pp": {"tiles": [2, 1], "stages": 3, "spatial_stages": 1, "microbatches": 4},
    "two spatial stages": {"tiles": [1, 2], "stages": 3, "spatial_stages": 2, "microbatches": 2},
    "all stages spatial": {
        "tiles": [2, 1],
        "stages": 2,
        "spatial_stages": 2,
        "microbatches": 4,
        "schedule": "1f1b",
    },
    "sp+pp dp": {
        "tiles": [2, 1],
        "stages": 2,
        "spatial_stages": 1,
        "replicas": 2,
        "microbatches": 2,
    },
}


LAYOUTS |= {
    "two grids": {"tiles": [[2, 2], [1, 2]], "stages": 3, "microbatches": 2},
    "tiles behind a whole stage": {"tiles": [[1, 1], [2, 1]], "stages": 3},
    "local_dp": {"tiles": [2, 1], "stages": 3, "local_dp": 2, "microbatches": 2},
    "local_dp without tiles": {"stages": 2, "local_dp": 2, "replicas": 2},
    "gems": {"stages": 2, "directions": 2, "schedule": "gems"},
    "gems odd": {"stages": 3, "directions": 2, "schedule": "gems", "pairs": 2},
    "gems_1f1b": {"stages": 3, "directions": 2, "schedule": "gems_1f1b", "microbatches": 2},
    "gems dp": {"stages": 2, "directions": 2, "schedule": "gems", "replicas": 2},
    "sp+gems": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"},
    "sp+gems on shared ranks": {"tiles": [2, 2], "stages": 2, "directions": 2, "schedule": "gems"},
    "sp+pp+gems": {
        "tiles": [1, 2],
        "stages": 3,
        "directions": 2,
        "schedule": "gems_1f1b",
        "microbatches": 2,
    },
    "sp+gems local_dp": {
        "tiles": [2, 1],
        "stages": 2,
        "local_dp": 2,
        "directions": 2,
        "schedule": "gems",
    },
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str, tmp_path: Path):
    check(tmp_path, batch=8, parallel={"name": name, **LAYOUTS[name]})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tiles", [[3, 1], [1, 3], [2, 2]])
def test_stride_32_network_on_uneven_tiles_that_run_empty(tiles: list[int], tmp_path: Path):
    # 75x61 becomes 3x2 at the end: with three columns one tile holds nothing there.
    model = {"name": "custom", "target": "tests.helpers.custom_nets:slim_resnet"}
    check(tmp_path, image=[75, 61], model=model, parallel={"name": "sp", "tiles": tiles})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tiles", [[2, 1], [1, 3], [2, 2]])
@pytest.mark.parametrize("dense", [False, True])
def test_network_with_every_rule(tiles: list[int], dense: bool, tmp_path: Path):
    model = {**ZOO, "args": {"dense": dense}}
    check(tmp_path, image=[37, 41], model=model, data=ZOO_DATA, parallel={"tiles": tiles})


def test_network_with_every_rule_in_two_spatial_stages_and_a_join(tmp_path: Path):
    parallel = {"tiles": [2, 1], "stages": 3, "spatial_stages": 2, "microbatches": 2}
    check(tmp_path, image=[37, 41], model=ZOO, data=ZOO_DATA, parallel=parallel)


SCALED = {"name": "custom", "target": "tests.helpers.custom_nets:scaled"}


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"stages": 2, "local_dp": 2},
        {"tiles": [2, 1], "stages": 2, "local_dp": 2},
        {"tiles": [2, 1], "stages": 3, "local_dp": 2, "directions": 2, "schedule": "gems"},
        {"tiles": [[1, 1], [2, 1]], "stages": 3},
        {"replicas": 2},
    ],
)
def test_values_made_of_parameters_and_norms_that_run_twice_or_never(
    parallel: dict[str, Any], tmp_path: Path
):
    # Each shard knows a part of such a value's gradient; it was taken for all of it. The counter of
    # a norm counts each of its uses, and none of a norm that stays in evaluation.
    parallel = {"microbatches": 1, **parallel}
    if parallel.get("stages") == 3:
        parallel["balance"] = [2, 1, 1]  # the norm that runs twice belongs to one stage
    pieces = parallel.get("replicas", 1) * parallel.get("directions", 1)
    check(tmp_path, batch=4 * pieces, model=SCALED, data=ZOO_DATA, parallel=parallel)


CHECKPOINTED: dict[str, dict[str, Any]] = {
    "single": {},
    "dp": {"replicas": 2, "microbatches": 2},
    "pp": {"stages": 3, "microbatches": 4, "schedule": "1f1b"},
    "sp": {"tiles": [2, 2]},
    "sp+pp": {"tiles": [2, 1], "stages": 3, "microbatches": 2},
    "sp+gems": {"tiles": [2, 1], "stages": 2, "local_dp": 2, "directions": 2, "schedule": "gems"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("checkpoint", ["stage", "block"])
def test_recomputation_changes_nothing(name: str, checkpoint: str, tmp_path: Path):
    memory = {"checkpoint": checkpoint}
    check(tmp_path, batch=4, memory=memory, parallel={"name": name, **CHECKPOINTED[name]})


def test_recomputation_of_every_rule(tmp_path: Path):
    memory, parallel = {"checkpoint": "block"}, {"tiles": [2, 1], "stages": 2}
    check(tmp_path, image=[37, 41], model=ZOO, data=ZOO_DATA, memory=memory, parallel=parallel)


def test_inference_equals_one_process(tmp_path: Path):
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2}
    check(tmp_path, image=[37, 41], task={"name": "infer"}, parallel=parallel)


def test_halo_taller_than_the_tile_is_borrowed_from_beyond_the_neighbour(tmp_path: Path):
    # Tiles of 2 to 3 rows at the dilated convolution, which reaches 4 rows up and down.
    check(tmp_path, image=[19, 22], model=ZOO, data=ZOO_DATA, parallel={"tiles": [4, 1]})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parallel", [{"replicas": 2, "microbatches": 2}, {"tiles": [2, 1]}])
@pytest.mark.parametrize("gradients", ["early", "late"])
def test_large_gradients_that_travel_alone(
    gradients: str, parallel: dict[str, Any], tmp_path: Path
):
    # Early: gradients of 1 MiB and more set out during the last backward pass.
    keys = {"model": {"name": "resnet", "depth": 18, "classes": 4}, "parallel": parallel}
    comm = {"shared_memory": False}
    check(tmp_path, image=[64, 40], batch=4, comm=comm, gradients=gradients, **keys)


def test_tiles_without_shared_memory(tmp_path: Path):
    # As tiles on several machines talk: every border and statistic point to point over gloo.
    comm = {"shared_memory": False}
    check(tmp_path, batch=4, comm=comm, parallel={"tiles": [2, 2], "microbatches": 2})


TEXTURED = {"name": "custom", "target": "tests.helpers.custom_nets:textured"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("parallel", "keys"),
    [
        ({"tiles": [2, 2]}, {"memory": {"checkpoint": "block"}}),
        ({"tiles": [3, 1], "microbatches": 2, "halo": {"fuse": 3}}, {}),
        ({"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"}, {}),
        ({"replicas": 2, "microbatches": 2}, {}),
        ({"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "local_dp": 2}, {}),
    ],
    ids=["recomputed", "fused", "gems", "replicas", "shards"],
)
def test_norms_pads_and_dropout_of_the_whole_image(
    parallel: dict[str, Any], keys: dict[str, Any], tmp_path: Path
):
    # The masks are those of one process: of the same sample, channel and pixel.
    keys = {"batch": 4, "image": [17, 14], "model": TEXTURED, "data": ZOO_DATA, **keys}
    check(tmp_path, parallel=parallel, **keys)


def test_dropout_of_samples_on_several_ranks(tmp_path: Path):
    model = {"name": "custom", "target": "tests.helpers.custom_nets:drops"}
    parallel = {"tiles": [2, 1], "stages": 2, "local_dp": 2, "microbatches": 2}
    check(tmp_path, batch=4, model=model, data=ZOO_DATA, parallel=parallel)
