"""Where do the ranks of a run start and meet, by which command, and in which environment?"""

from __future__ import annotations

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks.world import World, from_environment
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import places as rank_places
from hires.launcher.ranks.rank_group import rank_environment

WORLD = World(1, 2, 1, 2, "127.0.0.1", 29500, 0)


def places(num_ranks: int = 3, words: tuple[str, ...] = (), **keys):
    config = RunConfig(launcher=LauncherConfig(**{"name": "mpirun", **keys}))
    return launcher_of(config).rank_places(config, num_ranks, words)


@pytest.fixture
def routed(monkeypatch):
    """Other hosts are reached by one address of this one."""
    monkeypatch.setattr(rank_places.network, "own_address_towards", lambda host: "10.0.0.1")


def test_local_ranks_have_no_common_command():
    assert places(name="local").starter is None


def test_ranks_of_this_machine_meet_on_it():
    found = places()
    assert (found.address, found.starter.dialect) == ("127.0.0.1", "openmpi")
    assert "localhost:3" in found.starter.words
    assert places(name="torchrun").starter.dialect == "torchrun"


def test_ranks_of_several_hosts_meet_at_an_address_that_is_no_loopback(routed):
    found = places(hosts=["localhost", "n2"])
    assert (found.address, found.interface) == ("10.0.0.1", None)
    assert [(place.node, place.local_rank) for place in found.ranks] == [
        ("localhost", 0),
        ("localhost", 1),
        ("n2", 0),
    ]
    assert "localhost:2,n2:1" in found.starter.words


def test_loopback_between_hosts_is_refused(monkeypatch):
    monkeypatch.setattr(rank_places.network, "own_address_towards", lambda host: "127.0.1.1")
    with pytest.raises(RunError, match=r"n2 \(launcher.hosts\) .* leads to 127.0.1.1"):
        places(hosts=["localhost", "n2"])


def test_host_that_no_network_leads_to_is_named(monkeypatch):
    def refuse(host):
        raise OSError("no route")

    monkeypatch.setattr(rank_places.network, "own_address_towards", refuse)
    with pytest.raises(RunError, match=r"n2 .*: no route; .*launcher.interface"):
        places(hosts=["localhost", "n2"])


def test_named_interface_decides_the_address(monkeypatch):
    monkeypatch.setattr(rank_places.network, "address_of", {"ib0": "10.1.0.1"}.__getitem__)
    launcher = LauncherConfig(name="mpirun", hosts=["localhost", "n2"])
    config = RunConfig(launcher=launcher, cluster=ClusterConfig(interface="ib0"))
    found = launcher_of(config).rank_places(config, 2)
    assert (found.address, found.interface) == ("10.1.0.1", "ib0")


@pytest.fixture
def head(monkeypatch, routed):
    """This machine is no host of the run, but finds those named n1 and n2."""
    monkeypatch.setattr(rank_places, "is_this_machine", lambda name: False)
    monkeypatch.setattr(
        rank_places.socket, "gethostbyname", {"n1": "10.0.0.11", "n2": "10.0.0.12"}.__getitem__
    )


@pytest.mark.parametrize("hosts", [["n1", "n2"], ["n1"]])
def test_head_node_starts_ranks_that_meet_at_the_first_host(head, hosts):
    found = places(hosts=hosts)
    assert (found.address, found.supervisor) == ("10.0.0.11", "10.0.0.1")
    assert [place.node for place in found.ranks] == sorted((hosts * 3)[:3])


def test_head_node_needs_no_interface_of_the_hosts(head):
    found = places(hosts=["n1", "n2"], interface="ib0")
    assert (found.supervisor, found.interface) == ("10.0.0.1", "ib0")


def test_first_host_that_is_not_found_is_named(monkeypatch, routed):
    with pytest.raises(RunError, match=r"runs on no\.such\.host \(launcher\.hosts\), which"):
        places(hosts=["no.such.host", "localhost"])


def test_head_node_that_no_host_reaches_is_named(head, monkeypatch):
    monkeypatch.setattr(rank_places.network, "own_address_towards", lambda host: "127.0.1.1")
    with pytest.raises(RunError, match=r"n1 \(launcher.hosts\) .* start the run on one of the"):
        places(hosts=["n1", "n2"])


def test_command_of_the_script_is_taken_as_it_stands():
    words = ("/opt/mpirun", "--mca", "x", "a b")
    assert places(words=words).starter.words == words


def test_srun_outside_of_a_job_says_what_would_help(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(RunError, match=r"inside a Slurm job .*salloc.*launcher=slurm"):
        places(mpi="srun")


def test_rank_gets_its_world_and_threads():
    config = RunConfig(launcher=LauncherConfig(threads=3))
    base = {"PATH": "/bin", "OMP_NUM_THREADS": "64"}
    environ = rank_environment(base, WORLD, config, interface="lo")
    assert from_environment(environ) == WORLD
    assert environ["PATH"] == "/bin"
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"


def test_world_of_an_outer_launcher_is_not_inherited():
    """Under torchrun these tell torch that the agent hosts the meeting point: nobody would."""
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5", "WORLD_SIZE": "9"}
    environ = rank_environment(outer, WORLD, RunConfig(), interface="lo")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environ
    assert environ["RANK"] == "1"


def test_interface_chosen_by_the_user_stays():
    environ = rank_environment({"GLOO_SOCKET_IFNAME": "eth7"}, WORLD, RunConfig(), interface="lo")
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_rank_on_a_gpu_gets_what_cuda_and_nccl_read():
    cluster = ClusterConfig(environment={"NCCL_RUNTIME_CONNECT": "1", "NCCL_ALGO": "Ring"})
    config = RunConfig(device="cuda", comm=CommConfig(backend="nccl"), cluster=cluster)
    base = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    environ = rank_environment(base, WORLD, config, interface="ib0")
    assert environ["NCCL_SOCKET_IFNAME"] == "=ib0"  # and not ib0.8001
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    # The site's own settings count before these, and the user's before both.
    assert (environ["NCCL_RUNTIME_CONNECT"], environ["NCCL_ALGO"]) == ("1", "Ring")
    assert environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    # A queue that streams share could stop them all, so no setting counts before this one.
    few = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert rank_environment(few, WORLD, config, None)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert rank_environment(few, WORLD, RunConfig(), None)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    on_cores = rank_environment({}, WORLD, RunConfig(), interface="ib0")
    assert not any(name.startswith(("NCCL_", "CUDA_")) for name in on_cores)
