"""Layouts whose messages an MPI carries compute what one process does, and the bits of gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import run_folders, verify_each
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.parity_rows import by_world, require_exact, rows
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import losses, make

pytestmark = pytest.mark.mpi


def keys_of(mpi: str, backend: str = "mpi", **comm: Any) -> dict[str, Any]:
    messages = {"backend": backend, "shared_memory": False, **comm}
    return {"launcher": {"name": "mpirun", "mpi": mpi}, "comm": messages}


def test_rows_equal_one_process(mpi: str, tmp_path: Path):
    """One command for each size of the world; one row also on the simulated device."""
    shared = "sp in shared memory"
    layouts = [
        row.given(tmp_path, **keys_of(mpi, shared_memory=name == shared))
        for name, row in rows("mpi").items()
    ]
    assert all(plan["backend"] == "mpi" for _, _, plan, _ in layouts)
    for size, some in by_world(layouts).items():
        folder = tmp_path / f"ranks {size}"
        folder.mkdir()
        most_s = 60 + 20 * len(some)
        errors = run_mpi(mpi, verify_each, size, some, folder=folder, timeout_s=most_s)[0]
        require_exact(errors, some)


def test_row_equals_one_process_on_a_device_that_is_no_cpu(mpi: str, tmp_path: Path):
    layout = rows("mpi")["sp+lp"].given(tmp_path, device="simulated", **keys_of(mpi))
    size = layout[2]["world"]
    require_exact(run_mpi(mpi, verify_each, size, [layout], folder=tmp_path)[0], [layout])


def test_losses_of_two_ranks_are_the_bits_of_gloo(mpi: str, tmp_path: Path):
    # Two terms have one sum; of more than two the libraries choose the order.
    layouts = ({"tiles": [2, 1]}, {"stages": 2}, {"replicas": 2})
    found = {}
    for backend in ("gloo", "mpi"):
        keys = {**keys_of(mpi, backend), "steps": 3}
        folders = [
            str(make(tmp_path / f"{backend} {precision} {number}", **keys, parallel=parallel,
                     precision={"name": precision}))
            for precision in ("fp32", "bf16")
            for number, parallel in enumerate(layouts)
        ]  # fmt: skip
        if backend == "gloo":
            run_ranks(run_folders, 2, folders)
        else:
            run_mpi(mpi, run_folders, 2, folders, folder=tmp_path)
        found[backend] = [losses(Path(folder), 0) for folder in folders]
    assert found["mpi"] == found["gloo"]
    assert all(found["mpi"])
