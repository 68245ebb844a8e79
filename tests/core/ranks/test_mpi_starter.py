"""Each program that starts many ranks gets the same facts, in its own words."""

from __future__ import annotations

import contextlib
import os
import shlex

import pytest

from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import mpi_starter
from hires.core.ranks.mpi_starter import Host
from hires.core.ranks.world import Numbers, rank_numbers

HOSTS = [Host("n1", 3), Host("n2", 2)]


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """No program is found, and the environment is small."""
    monkeypatch.setattr(mpi_starter.shutil, "which", lambda name: None)
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("NCCL_X", "1")
    monkeypatch.setenv("SECRET", "1")


def config(**keys) -> RunConfig:
    return RunConfig(launcher=LauncherConfig(**{"name": "mpirun", **keys}))


def line(hosts=HOSTS, in_slurm=False, **keys) -> str:
    return shlex.join(mpi_starter.starter(config(**keys), hosts, in_slurm).words)


COMMANDS = {
    "openmpi": "mpirun -np 5 --bind-to none --host n1:3,n2:2",
    "mpich": "mpirun -n 5 -bind-to none -genvall -hosts n1:3,n2:2",
    "mvapich": "mpirun_rsh -export -np 5 n1 n1 n1 n2 n2 MV2_ENABLE_AFFINITY=0 "
    "MVP_ENABLE_AFFINITY=0",
    "srun": "srun --mpi=none --ntasks=5 --overlap --export=ALL --cpu-bind=none --input=none "
    "--kill-on-bad-exit=1 --distribution=arbitrary --nodelist=n1,n1,n1,n2,n2",
    "torchrun": "torchrun --standalone --nproc-per-node=5 --max-restarts=0 --no-python",
}


@pytest.mark.parametrize("starter", COMMANDS)
def test_command_line_of_every_starter(starter):
    keys = {"name": "torchrun"} if starter == "torchrun" else {"mpi": starter}
    hosts = [Host("localhost", 5)] if starter == "torchrun" else HOSTS
    assert line(hosts=hosts, **keys) == COMMANDS[starter]
    assert mpi_starter.hosts_of(config(hosts=["n1", "n2"]), 5) == HOSTS


@pytest.mark.parametrize(
    ("by", "words"),
    [
        ("apptainer", "apptainer exec --bind {0}:{0} --bind {0}/r:{0}/r --bind '/my data:/d' --nv"),
        (
            "pyxis",
            "--container-image=a.sif --container-mounts={0}:{0},{0}/r:{0}/r,'/my data:/d' --nv",
        ),
    ],
)
def test_ranks_of_a_job_run_in_the_container_of_their_site(tmp_path, monkeypatch, by, words):
    monkeypatch.chdir(tmp_path)
    site = ClusterConfig(
        container="a.sif",
        container_by=by,
        container_mounts=["/my data:/d"],
        container_options=["--nv"],
        container_python="/opt/python",
    )
    inside = RunConfig(results="r", launcher=LauncherConfig(name="slurm"), cluster=site)
    rank = ["/usr/bin/python", "-m", "hires.worker"]
    command = mpi_starter.starter(inside, HOSTS, in_slurm=True).command({}, rank)
    words = words.format(tmp_path)
    image = " a.sif" if by == "apptainer" else ""
    wanted = f"{COMMANDS['srun']} {words}{image} /opt/python -m hires.worker"
    assert command == shlex.split(wanted)
    with (
        pytest.raises(ConfigError, match=r"pyxis is a plug-in of srun")
        if by == "pyxis"
        else (contextlib.nullcontext())
    ):
        RunConfig(launcher=LauncherConfig(name="slurm", mpi="openmpi"), cluster=site)


def test_words_of_the_user_and_of_slurm_are_passed_on(monkeypatch):
    assert " -bootstrap slurm " in line(mpi="mpich", in_slurm=True)
    assert " --mpi=pmix " in line(mpi="srun", srun_mpi="pmix")
    own = ["--mca", "btl_tcp_if_include", "ib 0; touch oops"]
    assert line(mpi_options=own).endswith(" --mca btl_tcp_if_include 'ib 0; touch oops'")
    assert line(mpirun="/opt/my mpi/mpirun").startswith("'/opt/my mpi/mpirun' -np 5 ")
    with pytest.raises(RunError, match=r"no mpirun_rsh here.*launcher.mpi=mvapich"):
        mpi_starter.require_program(mpi_starter.starter(config(mpi="mvapich"), HOSTS))
    # The program of a dialect goes before one of any.
    monkeypatch.setattr(mpi_starter.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert line(mpi="openmpi").startswith("mpirun.openmpi ")
    assert line(mpi="mpich").startswith("mpiexec.hydra ")


def test_open_mpi_takes_what_ranks_elsewhere_need_of_the_environment(monkeypatch):
    environ = {**os.environ, "OURS": "1", "NCCL_X": "2"}
    starter = mpi_starter.starter(config(), HOSTS)
    for user, allowed in (
        (0, {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}),
        (1, set()),
    ):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert {*starter.environment({})} == allowed
    words = starter.command(environ, ["rank"])
    assert words[:8] == ["mpirun", "-x", "NCCL_X", "-x", "OURS", "-x", "PATH", "-np"]
    assert words[-1] == "rank"
    other = mpi_starter.starter(config(mpi="mpich"), HOSTS)
    assert other.command(environ, ["rank"]) == [*other.words, "rank"]


FOUR = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
NUMBERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in FOUR),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "mvapich": tuple(f"MV2_COMM_WORLD_{name}" for name in FOUR),
    "mvapich 3": tuple(f"MVP_COMM_WORLD_{name}" for name in FOUR),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


@pytest.mark.parametrize("version", NUMBERS)
def test_every_starter_has_its_own_variables_for_the_same_numbers(version):
    starter = version.split()[0]
    environ = dict(zip(NUMBERS[version], ("4", "5", "1", "2"), strict=True))
    if starter == "srun":
        environ |= {"SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_NODEID": "1"}
    assert rank_numbers(starter, environ) == Numbers(4, 5, 1, 2)
    for name in environ:
        left = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(ConfigError, match=name):
            rank_numbers(starter, left)


def test_counts_that_slurm_folds_are_unfolded():
    environ = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "0"}
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}
    assert rank_numbers("srun", environ).local_size == 1
    assert rank_numbers("srun", environ | {"SLURM_NODEID": "2"}).local_size == 2
    with pytest.raises(ConfigError, match="has no node 4"):
        rank_numbers("srun", environ | {"SLURM_NODEID": "4"})
