"""Windows that turn round or lie in other dims, and softmax over pixels: real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import config_of, plan_of, verified

pytestmark = pytest.mark.dist

MODEL = {"name": "custom", "target": "tests.helpers.token_nets:panorama", "classes": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "grid": {"parallel": {"tiles": [2, 2]}},
    "uneven rows, fused": {"parallel": {"tiles": [3, 1], "halo": {"fuse": 2}}},
    "replicas": {"parallel": {"replicas": 2}, "batch": 4},
    "shards": {"parallel": {"tiles": [1, 2], "stages": 2, "spatial_stages": 1, "local_dp": 2}},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_turned_maps_equal_one_process(name: str, tmp_path: Path):
    answer = verified(tmp_path, image=[11, 10], model=MODEL, **LAYOUTS[name])
    assert answer["ok"], answer


def test_turned_maps_are_not_gathered():
    plan = plan_of(config_of(image=[11, 10], model=MODEL, **LAYOUTS["grid"]))
    assert not [op for stage in plan.stages for op in stage.comm if op.kind == "gather"]
