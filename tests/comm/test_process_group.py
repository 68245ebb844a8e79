"""Scripts of torch.distributed with ``init_process_group("hires")``."""

from __future__ import annotations

import functools
import json
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hires.comm import torch_world
from hires.core.errors import ConfigError
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks
from tests.helpers.torch_scripts import SCRIPTS, run_scripts

pytestmark = pytest.mark.dist

COMPILED = "functional_compiled"
TABLE = {
    "format": 1,
    "rules": [
        {"operation": "all_reduce", "bytes": "..512", "route": "mpi"},
        {"operation": ["broadcast", "all_to_all"], "route": "mpi"},
    ],
    "default": "gloo",
}
IN_MEMORY = [{"operation": ["all_reduce", "all_gather", "send"], "route": "cma"}]
USUAL = tuple(name for name in SCRIPTS if name != COMPILED)


@functools.cache
def over_gloo(names: tuple[str, ...]) -> dict[str, str]:
    """Returns what each script raised on any rank; one world runs them all."""
    answers = run_ranks(run_scripts, 3, "gloo", True, names)
    return {name: "".join(answer[name] for answer in answers) for name in names}


@functools.cache
def over_memory() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "table.json"
        path.write_text(json.dumps(TABLE | {"rules": IN_MEMORY, "default": "shm"}))
        answers = run_ranks(run_scripts, 2, "", False, USUAL, "", str(path))
    return {name: "".join(answer[name] for answer in answers) for name in USUAL}


@functools.cache
def over_mpi(mpi: str, backends: str, table: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "table.json").write_text(table)
        given = f"file://{folder}/store", str(folder / "table.json") if table else ""
        answers = run_mpi(mpi, run_scripts, 2, backends, False, USUAL, *given, folder=folder)
    return {name: "".join(answer[name] for answer in answers) for name in USUAL}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", USUAL)
def test_script_is_bit_equal_to_gloo(name: str):
    assert not over_gloo(USUAL)[name]


@pytest.mark.parametrize("name", USUAL)
def test_script_is_right_over_shared_and_foreign_memory(name: str):
    assert not over_memory()[name]


def test_backend_on_which_torchs_groups_stand_is_refused():
    options = SimpleNamespace(
        global_ranks_in_group=[], timeout=timedelta(seconds=5), store=dist.HashStore(),
        group_rank=0, group_size=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="use nccl_direct"):
        torch_world.create(options, ["gloo", "nccl"])


@pytest.mark.slow
def test_compiled_functional_collective_runs():
    assert not over_gloo((COMPILED,))[COMPILED]


@pytest.mark.mpi
@pytest.mark.parametrize("name", USUAL)
def test_script_is_right_over_mpi(mpi: str, name: str):
    assert not over_mpi(mpi, "mpi", "")[name]


@pytest.mark.mpi
@pytest.mark.parametrize("name", USUAL)
def test_script_is_right_over_two_backends_by_size(mpi: str, name: str):
    assert not over_mpi(mpi, "", json.dumps(TABLE))[name]
