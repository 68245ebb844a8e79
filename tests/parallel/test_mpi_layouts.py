"""Layouts whose messages a real MPI carries compute what one process does, and what gloo does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import run_folders, verify_each
from tests.helpers.layouts import Given, config_of, given
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import losses, make

pytestmark = pytest.mark.mpi

LAYOUTS: dict[str, dict[str, Any]] = {
    "sp": {"parallel": {"tiles": [2, 1]}},
    "sp in shared memory": {"parallel": {"tiles": [1, 2]}, "comm": {"shared_memory": True}},
    "sp on a device": {"parallel": {"tiles": [2, 1]}, "device": "simulated"},
    "lp": {"parallel": {"stages": 2}},
    "pp 1f1b": {"parallel": {"stages": 2, "microbatches": 4, "schedule": "1f1b"}},
    "gems": {"parallel": {"stages": 2, "directions": 2, "schedule": "gems"}},
    "dp": {"parallel": {"replicas": 2}},
    "sp 3": {"parallel": {"tiles": [1, 3]}},
    "sp+lp": {"parallel": {"tiles": [2, 1], "stages": 2, "spatial_stages": 1}},
    "dp 3": {"parallel": {"replicas": 3}, "batch": 6},
    "sp 2x2": {"parallel": {"tiles": [2, 2], "microbatches": 2}},
    "sp+pp": {"parallel": {"tiles": [2, 1], "stages": 3, "spatial_stages": 1, "microbatches": 4}},
    "sp+gems": {"parallel": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"}},
    "sp+dp": {"parallel": {"tiles": [2, 1], "replicas": 2}},
    "local_dp": {"parallel": {"tiles": [2, 1], "stages": 2, "local_dp": 2, "microbatches": 2}},
    "inference": {
        "parallel": {"tiles": [2, 1], "stages": 2},
        "task": {"name": "infer"},
    },
}


def keys_of(mpi: str, keys: dict[str, Any]) -> dict[str, Any]:
    comm = {"backend": "mpi", "shared_memory": False} | keys.get("comm", {})
    return {"batch": 4, **keys, "launcher": {"name": "mpirun", "mpi": mpi}, "comm": comm}


def test_every_family_of_layouts_equals_one_process(mpi: str, tmp_path: Path):
    by_size: dict[tuple[int, str], list[Given]] = {}
    for name, keys in LAYOUTS.items():
        layout = given(name, tmp_path, config_of(**keys_of(mpi, keys)))
        assert layout[2]["backend"] == "mpi"
        by_size.setdefault((layout[2]["world"], layout[2]["device"]), []).append(layout)
    assert {size for size, _ in by_size} == {2, 3, 4}
    errors = {}
    for place, layouts in by_size.items():
        folder = tmp_path / "-".join(map(str, place))
        folder.mkdir()
        most_s = 60 + 20 * len(layouts)
        errors |= run_mpi(mpi, verify_each, place[0], layouts, folder=folder, timeout_s=most_s)[0]
    assert errors.keys() == LAYOUTS.keys()
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_of_two_ranks_are_the_bits_of_gloo(mpi: str, precision: str, tmp_path: Path):
    # Two terms have one sum; of more than two the libraries choose the order.
    found = {}
    for backend in ("gloo", "mpi"):
        folders = []
        for number, parallel in enumerate(({"tiles": [2, 1]}, {"stages": 2}, {"replicas": 2})):
            keys = keys_of(mpi, {"parallel": parallel, "precision": {"name": precision}})
            keys["comm"] |= {"backend": backend, "dtype": "value"}
            folders.append(str(make(tmp_path / f"{backend}{number}", **keys, steps=3)))
        if backend == "gloo":
            run_ranks(run_folders, 2, folders)
        else:
            run_mpi(mpi, run_folders, 2, folders, "mpi", folder=tmp_path)
        found[backend] = [losses(Path(folder), 0) for folder in folders]
    assert found["mpi"] == found["gloo"]
    assert all(found["mpi"])
