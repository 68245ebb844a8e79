"""Ranks that a command starts report values and errors, and none outlives it."""

from __future__ import annotations

import os

import pytest

from hires.bench import start_ranks
from hires.bench.start_ranks import stream_ranks
from hires.cli.verbs.verb_bench import COMM
from hires.core.errors import LateError, RunError
from tests.conftest import REPOSITORY
from tests.helpers.patience import PATIENCE_S, until

JOB = "tests.helpers.bench_jobs:add_up_and_fail"
VALUE = r'printf "\036hires {\"value\": 7}\n"'


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Returns a function that writes a program, the only one besides those of the system."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return write


def test_starter_is_the_mpi_of_this_machine_and_srun_only_in_a_job(program, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    program("srun", "exit 1")
    assert COMM.read(["comm"]).start == "torchrun"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert COMM.read(["comm"]).start == "srun"
    program("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    assert COMM.read(["comm"]).start == "openmpi"


def test_starter_that_is_missing_or_fails_names_its_option(program, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    job = JOB, 2, PATIENCE_S
    with pytest.raises(RunError, match=r"no mpirun here, which --start openmpi needs.* torchrun$"):
        list(stream_ranks(*job, start="openmpi"))
    program("mpirun", "echo no slots; exit 3")
    with pytest.raises(RunError, match=r"--start openmpi.*code 3: no slots; use --start torch"):
        list(stream_ranks(*job, start="openmpi"))
    where = r"its command on node7, node8 ended with code 3: no slots.*`ssh HOST true`$"
    with pytest.raises(RunError, match=where):
        list(stream_ranks(*job, start="openmpi", hosts=("node7", "node8")))


def test_no_rank_outlives_a_command_that_does_not_end_is_late_or_is_interrupted(
    program, tmp_path, monkeypatch
):
    def ranks_are_gone():
        pids = [int(text) for text in (tmp_path / "pids").read_text().split()]
        until(lambda: not any(os.path.exists(f"/proc/{pid}/cwd") for pid in pids))  # noqa: PTH110

    rank = f"sleep 600 & echo $$ $! > {tmp_path}/pids"
    # As an mpirun that is slow to clean up on other machines: all was measured.
    monkeypatch.setattr(start_ranks, "END_S", 0.1)
    program("mpirun.openmpi", f"{VALUE}; {rank}; exec 1>&-; sleep 600 >&2")
    program("mpirun.openmpi", f"(exec 1>&-; {rank}; wait) & {VALUE}; exec 1>&-; sleep 600")
    assert list(stream_ranks(JOB, 2, PATIENCE_S, start="openmpi")) == [7]
    ranks_are_gone()
    program("mpirun.openmpi", f"{rank}; sleep 600")
    with pytest.raises(LateError, match=r"not done after 0\.5 s"):
        list(stream_ranks(JOB, 2, 0.5, start="openmpi"))
    ranks_are_gone()
    program("mpirun.openmpi", f"{rank}; {VALUE}; sleep 600")
    values = stream_ranks(JOB, 2, PATIENCE_S, start="openmpi")
    assert next(values) == 7
    with pytest.raises(KeyboardInterrupt):
        values.throw(KeyboardInterrupt)
    ranks_are_gone()


@pytest.mark.dist
def test_values_of_rank_0_come_as_they_are_made_and_a_rank_that_fails_is_named(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    values = stream_ranks(JOB, 2, PATIENCE_S, 5)
    assert [next(values), next(values)] == [5.0, 11.0]
    with pytest.raises(RunError, match="rank 1 failed: CommError: rank of no use"):
        next(values)
