"""Is every program that starts many ranks told the same things, in its own words?"""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import mpi_starter
from hires.core.ranks.mpi_starter import Host, Numbers, numbers

HOSTS = [Host("n1", 3), Host("n2", 2)]
AGENT = f"{sys.executable} -P -m hires.launcher.ranks.agent"


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """No program is found, and the environment is small."""
    monkeypatch.setattr(mpi_starter.shutil, "which", lambda name: None)
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("HIRES_X", "1")
    monkeypatch.setenv("SECRET", "1")


def config(**keys) -> RunConfig:
    return RunConfig(launcher=LauncherConfig(**{"name": "mpirun", **keys}))


def line(hosts=HOSTS, in_slurm=False, **keys) -> str:
    return shlex.join(mpi_starter.starter(config(**keys), hosts, in_slurm).words)


@pytest.mark.parametrize(
    ("mpi", "expected"),
    [
        ("openmpi", "mpirun -np 5 --bind-to none --host n1:3,n2:2 -x HIRES_X -x PATH"),
        ("mpich", "mpirun -n 5 -bind-to none -genvall -hosts n1:3,n2:2"),
        ("mvapich", "mpirun_rsh -export -np 5 n1 n1 n1 n2 n2 MV2_ENABLE_AFFINITY=0"),
        (
            "srun",
            "srun --mpi=none --ntasks=5 --overlap --export=ALL --cpu-bind=none --input=none "
            "--kill-on-bad-exit=0 --distribution=arbitrary --nodelist=n1,n1,n1,n2,n2",
        ),
    ],
)
def test_command_line_of_every_dialect(mpi, expected):
    assert line(mpi=mpi) == f"{expected} {AGENT}"


def test_command_line_of_torchrun():
    expected = "torchrun --standalone --nproc-per-node=5 --max-restarts=0 --no-python"
    assert line(name="torchrun", hosts=[Host("localhost", 5)]) == f"{expected} {AGENT}"


def test_hydra_starts_through_slurm_inside_a_job():
    assert " -bootstrap slurm " in line(mpi="mpich", in_slurm=True)


def test_type_of_pmi_and_further_words_are_passed_on():
    assert " --mpi=pmix " in line(mpi="srun", srun_mpi="pmix")
    own = ["--mca", "btl_tcp_if_include", "ib 0; touch oops"]
    assert f" --mca btl_tcp_if_include 'ib 0; touch oops' {AGENT}" in line(mpi_options=own)


def test_program_that_is_named_is_taken():
    assert line(mpirun="/opt/my mpi/mpirun").startswith("'/opt/my mpi/mpirun' -np 5 ")


def test_program_of_the_dialect_is_preferred_to_one_of_any(monkeypatch):
    monkeypatch.setattr(mpi_starter.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert line(mpi="openmpi").startswith("mpirun.openmpi ")
    assert line(mpi="mpich").startswith("mpiexec.hydra ")


def test_open_mpi_runs_as_root_only_if_it_is_told_to(monkeypatch):
    starter = mpi_starter.starter(config(), HOSTS)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert starter.environment({"A": "1"})["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert starter.environment({"A": "1"}) == {"A": "1"}


def test_missing_program_is_named_with_what_would_help():
    with pytest.raises(RunError, match=r"no mpirun_rsh here.*launcher.mpi=mvapich"):
        mpi_starter.require_program(mpi_starter.starter(config(mpi="mvapich"), HOSTS))


def test_hosts_share_the_ranks_evenly():
    found = mpi_starter.hosts_of(config(hosts=["n1", "n2"]), 5)
    assert found == HOSTS
    assert mpi_starter.hosts_of(config(), 5) == [Host("localhost", 5)]


@pytest.mark.parametrize(
    ("starter", "environ"),
    [
        ("torchrun", {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
        (
            "openmpi",
            {
                "OMPI_COMM_WORLD_RANK": "4",
                "OMPI_COMM_WORLD_SIZE": "5",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
        ),
        (
            "mpich",
            {"PMI_RANK": "4", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ),
        (
            "mvapich",
            {
                "MV2_COMM_WORLD_RANK": "4",
                "MV2_COMM_WORLD_SIZE": "5",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
        ),
        (
            "srun",
            {
                "SLURM_PROCID": "4",
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "3,2",
                "SLURM_NODEID": "1",
            },
        ),
    ],
)
def test_every_starter_has_its_own_words_for_the_same_numbers(starter, environ):
    assert numbers(starter, environ) == Numbers(4, 5, 1, 2)
    for name in environ:
        left = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(ConfigError, match=name):
            numbers(starter, left)


def test_counts_that_slurm_folds_are_unfolded():
    environ = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "0"}
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}
    assert numbers("srun", environ).local_size == 1
    assert numbers("srun", environ | {"SLURM_NODEID": "2"}).local_size == 2
    with pytest.raises(ConfigError, match="has no node 4"):
        numbers("srun", environ | {"SLURM_NODEID": "4"})
