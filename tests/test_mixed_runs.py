"""Runs over several backends at once equal one process, and travel as their plans say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hires.report.read.message_rows import message_sums
from tests.helpers.commands import hires

TINY = ["model=preact_resnet", "model.n=1", "image=[37,33]", "batch=4"]
MEMORY = [
    {"operation": "send", "bytes": "..2KiB", "route": "shm"},
    {"operation": "send", "bytes": "2KiB..4KiB", "route": "shm:message"},
    {"operation": "all_gather", "bytes": "..200", "route": "shm:slots"},
    {"operation": "all_gather", "route": "gloo:direct"},
    {"operation": "all_reduce", "dtype": "float", "bytes": "16..64KiB", "route": "shm:direct"},
    {
        "operation": "all_reduce",
        "dtype": "float",
        "bytes": "64KiB..",
        "route": "shm:segmented:32KiB",
    },
]
MPI = [
    {"operation": "send", "bytes": "..2KiB", "route": "mpi"},
    {"operation": "all_gather", "bytes": "..200", "route": "mpi"},
    {
        "operation": "all_reduce",
        "dtype": "float",
        "bytes": "64KiB..",
        "route": "mpi:segmented:8KiB",
    },
    {"operation": "all_reduce", "dtype": "float", "bytes": "16..64KiB", "route": "mpi:direct"},
]


@pytest.mark.parametrize(
    ("rules", "words", "backends"),
    [
        pytest.param(MEMORY, [], {"gloo", "shm"}, marks=pytest.mark.dist),
        pytest.param(MPI, ["launcher=mpirun"], {"gloo", "mpi"}, marks=pytest.mark.mpi),
    ],
    ids=["memory", "mpi"],
)
def test_mixed_routes_of_sp_gems(tmp_path: Path, rules, words, backends):
    if "launcher=mpirun" in words and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here; make test-mpi installs it")
    table = {"format": 1, "rules": rules, "default": "gloo"}
    (tmp_path / "table.json").write_text(json.dumps(table))
    words = [*TINY, *words, "parallel=sp+gems", "comm=mix", "comm.table=table.json"]
    hires(tmp_path, "run", *words, "steps=3", "measure.warmup=1", "--json")
    [record] = tmp_path.glob("results/*/*/record.json")
    sums = message_sums(json.loads(record.read_text()))
    assert sums is not None
    assert sums.differences() == []
    assert {row["backend"] for row in sums.rows} == backends
    hires(tmp_path, "verify", *words)  # below 1e-10, or it exits with another code
