"""What ranks get when they start, and the faults of a command that starts them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import places as rank_places
from hires.launcher.ranks.rank_group import rank_environment
from tests.helpers.launches import exit_json


def places(num_ranks: int = 3, words: tuple[str, ...] = (), **keys):
    config = RunConfig(launcher=LauncherConfig(**{"name": "mpirun", **keys}))
    return launcher_of(config).rank_places(config, num_ranks, words)


@pytest.fixture
def routed(monkeypatch):
    """Other hosts are reached by one address of this one."""
    monkeypatch.setattr(rank_places, "own_address_towards", lambda host: "10.0.0.1")


def test_places_and_command_follow_from_the_hosts(routed, monkeypatch):
    assert places(name="local").starter is None
    found = places()
    assert (found.address, found.starter.dialect) == ("127.0.0.1", "openmpi")
    assert "localhost:3" in found.starter.words
    assert places(name="torchrun").starter.dialect == "torchrun"
    found = places(hosts=["localhost", "n2"])
    assert (found.address, found.interface) == ("10.0.0.1", None)
    assert "localhost:2,n2:1" in found.starter.words
    words = ("/opt/mpirun", "--mca", "x", "a b")  # of the script, as they stand
    assert places(words=words).starter.words == words
    monkeypatch.setattr(rank_places, "address_of", {"ib0": "10.1.0.1"}.__getitem__)
    found = places(hosts=["localhost", "n2"], interface="ib0")
    assert (found.address, found.interface) == ("10.1.0.1", "ib0")


def test_hosts_that_do_not_reach_each_other_are_named(monkeypatch, routed):
    def refuse(host):
        raise OSError("no route")

    with pytest.raises(RunError, match=r"run on no\.such\.host \(launcher\.hosts\)"):
        places(hosts=["no.such.host", "localhost"])
    monkeypatch.setattr(rank_places, "own_address_towards", lambda host: "127.0.1.1")
    with pytest.raises(RunError, match=r"n2 \(launcher.hosts\) .* leads to 127.0.1.1"):
        places(hosts=["localhost", "n2"])
    monkeypatch.setattr(rank_places, "own_address_towards", refuse)
    with pytest.raises(RunError, match=r"n2 .*: no route; .*launcher.interface"):
        places(hosts=["localhost", "n2"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(RunError, match=r"inside a Slurm job .*salloc.*launcher=slurm"):
        places(mpi="srun")


def test_rank_gets_its_threads_and_nothing_of_an_outer_launcher():
    config = RunConfig(launcher=LauncherConfig(threads=3))
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "HIRES_STARTER": "openmpi"}
    base = {"PATH": "/bin", "OMP_NUM_THREADS": "64", "GLOO_SOCKET_IFNAME": "eth7", **outer}
    environ = rank_environment(base, config, interface="lo")
    assert (environ["PATH"], environ["GLOO_SOCKET_IFNAME"]) == ("/bin", "eth7")
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"
    # torch would look for a store that another process hosts, and none does.
    assert not outer.keys() & environ.keys()


def test_rank_gets_the_secret_that_its_config_names(monkeypatch):
    monkeypatch.setenv("HIRES_TOKEN", "s3cret")
    config = RunConfig(cluster=ClusterConfig(environment={"TOKEN": "${oc.env:HIRES_TOKEN}"}))
    assert rank_environment({}, config, interface=None)["TOKEN"] == "s3cret"


def test_rank_on_a_gpu_gets_what_cuda_and_nccl_read():
    cluster = ClusterConfig(environment={"NCCL_RUNTIME_CONNECT": "1", "NCCL_ALGO": "Ring"})
    config = RunConfig(device="cuda", comm=CommConfig(backend="nccl"), cluster=cluster)
    base = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    environ = rank_environment(base, config, interface="ib0")
    assert environ["NCCL_SOCKET_IFNAME"] == "=ib0"  # and not ib0.8001
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    # The site's own settings count before these, and the user's before both.
    assert (environ["NCCL_RUNTIME_CONNECT"], environ["NCCL_ALGO"]) == ("1", "Ring")
    assert environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    # A queue that streams share could stop them all, so no setting counts before this one.
    few = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert rank_environment(few, config, None)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert rank_environment(few, RunConfig(), None)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    on_cores = rank_environment({}, RunConfig(), interface="ib0")
    assert not any(name.startswith(("NCCL_", "CUDA_")) for name in on_cores)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


STARTS_ONE = (
    'trap : TERM; while [ "$1" != localhost:1 ]; do shift; done; shift; '
    "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 "
    'OMPI_COMM_WORLD_LOCAL_SIZE=1 "$@"; echo $? > "$0.code"; {more}'
)
"""Starts one rank as Open MPI's mpirun does."""


def test_ranks_of_a_command_see_the_gpus_that_were_chosen_for_them(fake_world, launch, tmp_path):
    program, more = tmp_path / "mpirun", 'echo "$CUDA_VISIBLE_DEVICES" > "$0.gpus"'
    script(program, STARTS_ONE.format(rank=0, more=more))
    launch(fake_world("ok", name="mpirun", mpirun=str(program)), gpus=["3", "1"])
    assert program.with_name("mpirun.gpus").read_text() == "3,1\n"


def test_command_that_fails_is_quoted_and_its_rank_reports_the_end(fake_world, launch, tmp_path):
    run = fake_world("ok", name="mpirun", mpirun="/opt/none/bin/mpirun")
    with pytest.raises(RunError, match=r"no /opt/none/bin/mpirun here.*launcher=local"):
        launch(run)
    assert exit_json(run)["reason"] == "launch"
    program = tmp_path / "mpirun"
    keys = {"name": "mpirun", "mpirun": str(program)}
    script(program, "echo 'the moon is full' >&2; exit 3")
    outcome = launch(fake_world("ok", "ok", **keys))
    assert outcome.cause == "mpirun ended with code 3 before its ranks: the moon is full"
    assert outcome.reason == "launch"
    script(program, STARTS_ONE.format(rank=0, more="exit 0"))
    for behaviour, state, code in (("ok", "done", 0), ("exit 75", "failed", 75)):
        run = fake_world(behaviour, **keys)
        outcome = launch(run)
        assert (outcome.state, outcome.exit_codes) == (state, {0: code})
    assert outcome.reason == "preempted"
    seen = program.with_name("mpirun.code")
    assert seen.read_text() == "0\n"  # any other would end the ranks that still save
    assert (run.attempt_dir / "logs/rank0000.log").read_text() == "rank 0 is exit 75\n"
    for behaviour, end, cause, reason in (
        # Of the codes of a rank and of its command the rank's counts; without it, the words do.
        ("exit 4", "exit 1", "rank 0 exited with code 4: rank 0 is exit 4", "launch"),
        (
            "kill",
            "echo 'task 0: Out Of Memory'; exit 9",
            "ended with code 9 before its ranks: Killed task",
            "oom",
        ),
    ):
        script(program, STARTS_ONE.format(rank=0, more=end))
        outcome = launch(fake_world(behaviour, **keys))
        assert cause in outcome.cause
        assert seen.read_text() == {"exit 4": "4\n", "kill": "137\n"}[behaviour]
        assert outcome.reason == reason
    script(program, STARTS_ONE.format(rank="none", more=""))
    assert "OMPI_COMM_WORLD_RANK='none' must be a number" in launch(fake_world("ok", **keys)).cause
