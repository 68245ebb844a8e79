"""Values whose rows and columns are other dims stay in tiles, and equal one process: real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import config_of, plan_of, verified

pytestmark = pytest.mark.dist

ALIGNED, UNEVEN = [12, 8], [9, 10]
GEMS = {"tiles": [2, 1], "stages": 3, "spatial_stages": 2, "directions": 2, "schedule": "gems_1f1b"}


def keys(image: list[int], window: int, dense: bool = False, **more: Any) -> dict[str, Any]:
    """Of a run of the network with windows of so many pixels."""
    args = {"size": image, "window": window, "dense": dense}
    model = {"name": "custom", "target": "tests.helpers.token_nets:tokens", "args": args}
    return {"image": image, "model": model, "data": {"classes": 5, "length": 16}, **more}


LAYOUTS: dict[str, dict[str, Any]] = {
    "windows within tiles": keys(ALIGNED, 2, parallel={"tiles": [2, 2]}),
    "windows across borders": keys(UNEVEN, 3, dense=True, parallel={"tiles": [1, 2]}),
    "grid of uneven tiles": keys(UNEVEN, 2, parallel={"tiles": [2, 2]}),
    "stages, computed again": keys(
        ALIGNED, 2, batch=4, parallel=GEMS, memory={"checkpoint": "block"}
    ),
    "tiles join to shards": keys(
        UNEVEN, 3, parallel={"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "local_dp": 2}
    ),
    "shards alone": keys(UNEVEN, 3, parallel={"stages": 2, "local_dp": 2}),
    "two grids": keys(ALIGNED, 2, parallel={"tiles": [[2, 1], [1, 2]], "stages": 3}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_equal_one_process(name: str, tmp_path: Path):
    answer = verified(tmp_path, **LAYOUTS[name])
    assert answer["ok"], answer


def test_nothing_is_gathered_but_keys_and_values_where_windows_lie_within_tiles():
    plan = plan_of(config_of(**LAYOUTS["windows within tiles"]))
    gathered = [op.value for op in plan.stages[0].comm if op.kind == "gather"]
    assert len(gathered) == 3  # keys, values, transposed keys
    [note] = [finding for finding in plan.findings if finding.key == "parallel.gather"]
    assert "0% of the stage's operations run on every rank" in note.text
