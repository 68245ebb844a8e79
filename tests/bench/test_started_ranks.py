"""Do ranks that a command starts report, fail and end, and are the raw libraries called rightly?"""

from __future__ import annotations

import pytest

from hires.bench.message_operations import BENCHED, MESSAGES
from hires.bench.started_ranks import stream_started_ranks
from hires.bench.sweep import starter_of
from hires.core.errors import LateError, RunError
from tests.helpers.patience import PATIENCE_S

JOBS = "tests.helpers.comm_bench_jobs"


@pytest.fixture(autouse=True)
def _tests_are_found(monkeypatch, pytestconfig):
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_starter_is_the_mpi_of_this_machine_and_srun_only_in_a_job(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    program(tmp_path, "srun", "exit 1")
    assert starter_of("--start", "auto") == "torchrun"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert starter_of("--start", "auto") == "srun"
    for words, name in (("mpirun (Open MPI) 4.1.4", "openmpi"), ("HYDRA build details:", "mpich")):
        program(tmp_path, "mpirun", f"echo '{words}'")
        assert starter_of("--start", "auto") == name
    (tmp_path / "mpirun").unlink()
    program(tmp_path, "mpiexec.hydra", "exit 1")
    assert starter_of("--start", "auto") == "mpich"


def test_starter_that_is_missing_or_fails_names_its_option(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(RunError, match=r"no mpirun here, which --start openmpi needs.* torchrun$"):
        list(stream_started_ranks("openmpi", f"{JOBS}:failing", 2, PATIENCE_S))
    program(tmp_path, "mpirun", "echo no slots; exit 3")
    with pytest.raises(RunError, match=r"--start openmpi.*code 3: no slots; use --start torch"):
        list(stream_started_ranks("openmpi", f"{JOBS}:failing", 2, PATIENCE_S))


def test_failed_start_on_other_machines_names_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    program(tmp_path, "mpirun", "exit 255")
    where = r"its command on node7, node8 ended with code 255: no message.*`ssh HOST true`$"
    with pytest.raises(RunError, match=where):
        list(
            stream_started_ranks(
                "openmpi", f"{JOBS}:failing", 2, PATIENCE_S, hosts=("node7", "node8")
            )
        )


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_of_torchrun_measure_gloo():
    rows = [*stream_started_ranks("torchrun", f"{JOBS}:raw_libraries", 2, PATIENCE_S, False)]
    assert [row["operation"] for row in rows[::2]] == [*BENCHED]
    assert {row["ways"]["gloo"]["wrong"] for row in rows} == {0}


@pytest.mark.mpi
def test_raw_mpi_is_right_through_mpi4py_and_from_c(mpi):
    rows = [*stream_started_ranks(mpi, f"{JOBS}:raw_libraries", 3, PATIENCE_S, True)]
    assert len(rows) == 2 * len(BENCHED)
    wrong = {name: row["ways"][name].get("wrong") for row in rows for name in ("mpi4py", "c")}
    assert wrong == {"mpi4py": 0, "c": 0}
    assert {row["operation"] for row in rows if row["blocking"]} >= {*MESSAGES}


@pytest.mark.slow
@pytest.mark.dist
def test_rank_that_fails_is_named_and_no_other_stays():
    with pytest.raises(RunError, match="rank 1 failed: CommError: rank of no use"):
        list(stream_started_ranks("torchrun", f"{JOBS}:failing", 2, PATIENCE_S))


@pytest.mark.dist
def test_time_is_limited():
    with pytest.raises(LateError, match=r"not done after 0.5 s; use --timeout"):
        list(stream_started_ranks("torchrun", f"{JOBS}:failing", 2, 0.5))
