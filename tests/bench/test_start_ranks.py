"""Ranks that a command starts report values and errors, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hires.bench import start_ranks
from hires.bench.comm_bench import starter_of
from hires.bench.start_ranks import stream_ranks
from hires.core.errors import LateError, RunError
from tests.conftest import REPOSITORY
from tests.helpers.patience import PATIENCE_S, until

JOBS = "tests.helpers.bench_jobs"


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
    assert starter_of("auto") == "torchrun"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert starter_of("auto") == "srun"
    for words, name in (("mpirun (Open MPI) 4.1.4", "openmpi"), ("HYDRA build details:", "mpich")):
        program("mpirun", f"echo '{words}'")
        assert starter_of("auto") == name


def test_starter_that_is_missing_or_fails_names_its_option(program, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    job = f"{JOBS}:failing", 2, PATIENCE_S
    with pytest.raises(RunError, match=r"no mpirun here, which --start openmpi needs.* torchrun$"):
        list(stream_ranks(*job, start="openmpi"))
    program("mpirun", "echo no slots; exit 3")
    with pytest.raises(RunError, match=r"--start openmpi.*code 3: no slots; use --start torch"):
        list(stream_ranks(*job, start="openmpi"))
    where = r"its command on node7, node8 ended with code 3: no slots.*`ssh HOST true`$"
    with pytest.raises(RunError, match=where):
        list(stream_ranks(*job, start="openmpi", hosts=("node7", "node8")))


def test_command_that_does_not_end_loses_no_value_and_is_killed_when_time_is_over(
    program, tmp_path, monkeypatch
):
    # As an mpirun that is slow to clean up on other machines: all was measured.
    monkeypatch.setattr(start_ranks, "END_S", 0.1)
    line = r"\036hires {\"value\": 7}\n"
    program("mpirun.openmpi", f'printf "{line}"; exec 1>&-; sleep 600')
    assert list(stream_ranks(f"{JOBS}:failing", 2, PATIENCE_S, start="openmpi")) == [7]
    program("mpirun.openmpi", f"echo $$ > {tmp_path}/0.pid; sleep 600")
    with pytest.raises(LateError, match=r"not done after 0\.5 s"):
        list(stream_ranks(f"{JOBS}:failing", 2, 0.5, start="openmpi"))
    until(lambda: not any(map(alive, pids(tmp_path))))


@pytest.mark.dist
def test_values_of_rank_0_come_as_they_are_made_and_a_rank_that_fails_is_named(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    values = stream_ranks(f"{JOBS}:add_up_and_fail", 2, PATIENCE_S, 5)
    assert [next(values), next(values)] == [5.0, 11.0]
    with pytest.raises(RunError, match="rank 1 failed: CommError: rank of no use"):
        next(values)


@pytest.mark.dist
def test_no_rank_outlives_the_command(tmp_path):
    script = "from hires.bench.start_ranks import run_ranks\n"
    script += f"run_ranks('{JOBS}:sleep', 2, 100, {str(tmp_path)!r})\n"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as parent:
        try:
            until(lambda: len(pids(tmp_path)) == 2)
            parent.send_signal(signal.SIGINT)
            parent.wait(120)
        finally:
            parent.kill()
    until(lambda: not any(map(alive, pids(tmp_path))))


def pids(folder):
    return [int(text) for text in (p.read_text() for p in folder.glob("*.pid")) if text]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
