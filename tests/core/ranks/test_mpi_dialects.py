"""Is every program that starts many ranks told the same things, in its own words?"""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import mpi_dialects
from hires.core.ranks.mpi_dialects import Host
from hires.core.ranks.world import NUMBERINGS

HOSTS = [Host("n1", 3), Host("n2", 2)]
AGENT = f"{sys.executable} -m hires.launcher.ranks.agent"


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """No program is found, and the environment is small."""
    monkeypatch.setattr(mpi_dialects.shutil, "which", lambda name: None)
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("HIRES_X", "1")
    monkeypatch.setenv("SECRET", "1")


def config(**keys) -> RunConfig:
    return RunConfig(launcher=LauncherConfig(**{"name": "mpirun", **keys}))


def line(hosts=HOSTS, in_slurm=False, **keys) -> str:
    return shlex.join(mpi_dialects.starter(config(**keys), hosts, in_slurm).words)


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
    monkeypatch.setattr(mpi_dialects.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert line(mpi="openmpi").startswith("mpirun.openmpi ")
    assert line(mpi="mpich").startswith("mpiexec.hydra ")


def test_every_dialect_counts_its_processes_in_words_that_are_known():
    assert mpi_dialects.DIALECTS.keys() == NUMBERINGS.keys()


def test_open_mpi_runs_as_root_only_if_it_is_told_to(monkeypatch):
    starter = mpi_dialects.starter(config(), HOSTS)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert starter.environment({"A": "1"})["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert starter.environment({"A": "1"}) == {"A": "1"}


def test_missing_program_is_named_with_what_would_help():
    with pytest.raises(RunError, match=r"no mpirun_rsh here.*launcher.mpi=mvapich"):
        mpi_dialects.require_program(mpi_dialects.starter(config(mpi="mvapich"), HOSTS))


def test_hosts_share_the_ranks_evenly():
    found = mpi_dialects.hosts_of(config(hosts=["n1", "n2"]), 5)
    assert found == HOSTS
    assert mpi_dialects.hosts_of(config(), 5) == [Host("localhost", 5)]
