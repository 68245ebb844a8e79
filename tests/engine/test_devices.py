"""Every layout computes on a device that is not the CPU what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.device_jobs import errors_of

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"parallel": {"microbatches": 2}, "memory": {"checkpoint": "block"}},
    "sp 1x2": {"parallel": {"tiles": [1, 2]}},
    "sp 2x2": {"parallel": {"tiles": [2, 2], "microbatches": 2}},
    "lp": {"parallel": {"stages": 2}},
    "pp gpipe": {"parallel": {"stages": 2, "microbatches": 4}},
    "pp 1f1b": {"parallel": {"stages": 2, "microbatches": 4, "schedule": "1f1b"}},
    "gems": {"parallel": {"stages": 2, "directions": 2, "schedule": "gems"}},
    "sp+gems": {
        "parallel": {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"},
        "comm": {"shared_memory": False},
    },
    "sp+pp": {"parallel": {"tiles": [2, 1], "stages": 3, "spatial_stages": 1, "microbatches": 4}},
    "dp": {"parallel": {"replicas": 2}},
    "local_dp": {"parallel": {"tiles": [2, 1], "stages": 2, "local_dp": 2, "microbatches": 2}},
}


def test_layouts_equal_one_process_on_the_simulated_device(tmp_path: Path):
    errors = errors_of(tmp_path, {name: {"batch": 8, **keys} for name, keys in LAYOUTS.items()})
    assert errors.keys() == LAYOUTS.keys()
    assert max(errors.values()) < 1e-10, errors
