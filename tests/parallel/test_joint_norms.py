"""Do norms that share their messages compute what one process computes?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import verified
from tests.helpers.norm_nets import SampleNorms
from tests.helpers.simulated_tiles import check_tiles

BRANCHES = {"name": "custom", "target": "tests.helpers.norm_nets:branches", "classes": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "recomputed": {"parallel": {"tiles": [3, 1]}, "memory": {"checkpoint": "block"}},
    "fused halos": {"parallel": {"tiles": [2, 1], "halo": {"fuse": 2}, "microbatches": 2}},
    "shards behind tiles, mirrored": {
        "batch": 8,
        "parallel": {
            "tiles": [2, 1],
            "stages": 2,
            "local_dp": 2,
            "directions": 2,
            "schedule": "gems",
        },
    },
}


OF_SAMPLES: dict[str, dict[str, Any]] = {
    "sp": {"batch": 4, "parallel": {"tiles": [2, 2], "microbatches": 4}},
    "a tile without pixels": {"image": [5, 8], "parallel": {"tiles": [4, 1]}},
    "sp+gems, recomputed": {
        "batch": 8,
        "parallel": {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"},
        "memory": {"checkpoint": "block"},
    },
}


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_joint_norms_equal_one_process(layout, tmp_path: Path):
    answer = verified(tmp_path, model=BRANCHES, image=[26, 22], **LAYOUTS[layout])
    assert answer["ok"], answer["worst"]
    assert answer["max_rel_err"] < 1e-10


@pytest.mark.dist
@pytest.mark.parametrize("layout", OF_SAMPLES)
def test_joint_norms_of_samples_equal_one_process(layout, tmp_path: Path):
    keys = {"image": [22, 26], **OF_SAMPLES[layout]}
    target = "tests.helpers.norm_nets:sample_norms"
    keys["model"] = {"name": "custom", "target": target, "args": {"size": keys["image"]}}
    answer = verified(tmp_path, **keys)
    assert answer["ok"], answer["worst"]
    assert answer["max_rel_err"] < 1e-10


def test_joint_norms_of_samples_equal_torch_in_tiles_of_every_form():
    # Tiles hold more than they own: their neighbours' pixels, which count there only.
    grids = (2, 2), (3, 1), (1, 6)
    check_tiles(SampleNorms((10, 11), maps=True), (2, 3, 10, 11), *grids, joint=True)


@pytest.mark.slow
@pytest.mark.dist
def test_joint_norms_of_a_cell_equal_one_process(tmp_path: Path):
    model = {"name": "amoebanet", "layers": 3, "filters": 8, "classes": 4}
    answer = verified(tmp_path, model=model, image=[64, 64], parallel={"tiles": [2, 1]})
    assert answer["ok"], answer["worst"]
