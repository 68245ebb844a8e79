"""Do norms that share their messages compute what one process computes?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import verified

pytestmark = pytest.mark.dist

BRANCHES = {"name": "custom", "target": "tests.helpers.custom_nets:branches", "classes": 4}
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_joint_norms_equal_one_process(layout, tmp_path: Path):
    answer = verified(tmp_path, model=BRANCHES, image=[26, 22], **LAYOUTS[layout])
    assert answer["ok"], answer["worst"]
    assert answer["max_rel_err"] < 1e-10


def test_joint_norms_of_a_cell_equal_one_process(tmp_path: Path):
    model = {"name": "amoebanet", "layers": 3, "filters": 8, "classes": 4}
    answer = verified(tmp_path, model=model, image=[64, 64], parallel={"tiles": [2, 1]})
    assert answer["ok"], answer["worst"]
