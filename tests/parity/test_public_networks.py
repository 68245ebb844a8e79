"""Networks of a public library, as it makes them, compute in every layout what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.layouts import verified
from tests.helpers.pool import preload

pytest.importorskip("monai.networks.nets")
preload("monai.networks.nets")

NETWORKS = yaml.safe_load(Path(__file__).with_name("public_networks.yaml").read_text())
LAYOUTS: list[dict[str, Any]] = [
    {"tiles": [2, 2]},
    {"tiles": [2, 1], "stages": 2, "microbatches": 2},
    {"tiles": [1, 2], "stages": 2, "directions": 2, "schedule": "gems"},
    {"tiles": [1, 2], "stages": 2, "spatial_stages": 1, "local_dp": 2},
]
"""Each network runs in one of these, in turn."""


@pytest.mark.dist
@pytest.mark.parametrize("name", NETWORKS)
def test_network_equals_one_process(name: str, tmp_path: Path):
    row = NETWORKS[name]
    model = {"name": "custom", "target": row["target"], "args": row["args"], "classes": 5}
    answer = verified(
        tmp_path,
        image=[64, 96],
        batch=4,
        model=model,
        data={"classes": 5, "length": 16},
        parallel=LAYOUTS[[*NETWORKS].index(name) % len(LAYOUTS)],
    )
    assert answer["max_rel_err"] < 1e-10
