"""Which ranks go to which node of a job, and where do they meet?"""

from __future__ import annotations

import errno

import pytest

from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import places as rank_places
from hires.launcher.slurm import allocation, scheduler
from hires.launcher.slurm.allocation import Allocation, JobNode

HERE = (JobNode("n1", "a", "10.0.0.1"), JobNode("n2", "b", "10.0.0.2"))


def places(nodes=HERE, num_ranks=5, job="42", **keys):
    config = RunConfig(launcher=LauncherConfig(name="slurm", **keys))
    return Allocation(job, None, nodes).places(num_ranks, config)


@pytest.fixture
def routed(monkeypatch):
    """Other hosts are reached by one address of this one."""
    monkeypatch.setattr(rank_places.network, "own_address_towards", lambda host: "10.0.0.1")


def test_ranks_are_spread_evenly_and_neighbours_stay_together(routed):
    found = places().ranks
    assert [(place.node, place.local_rank, place.local_size) for place in found] == [
        ("n1", 0, 3),
        ("n1", 1, 3),
        ("n1", 2, 3),
        ("n2", 0, 2),
        ("n2", 1, 2),
    ]
    assert found[4].prefix[0] == "srun"
    assert found[4].prefix[-1] == "--nodelist=n2"


def test_fewer_ranks_than_nodes_leave_the_last_ones_free(routed):
    assert [place.node for place in places(num_ranks=1).ranks] == ["n1"]


def test_hosts_meet_at_an_address_that_is_no_loopback(routed):
    found = places()
    assert (found.address, found.interface, found.relayed) == ("10.0.0.1", None, True)
    assert (found.ranks[3].local_rank, found.ranks[3].local_size) == (0, 2)


def test_port_follows_from_the_job_or_is_the_one_that_was_asked_for(routed):
    assert places().ports == (10042, 0, 0)
    assert places(port=29500).ports == (29500,)


def test_packed_runs_do_not_meet_at_the_port_of_their_job(routed):
    config = RunConfig(launcher=LauncherConfig(name="slurm", pack=3))
    assert Allocation("42", None, HERE).places(2, config, packed=True).ports == (0, 0, 0)


def test_nodes_of_one_machine_meet_on_it():
    found = places((JobNode("n1", "a", "127.0.0.1"), JobNode("n2", "a", "127.0.0.1")))
    assert found.address == "127.0.0.1"


def test_shell_of_salloc_on_no_node_supervises_from_there(monkeypatch):
    monkeypatch.setattr(rank_places.network, "own_address_towards", lambda host: "10.0.0.9")
    monkeypatch.setattr(allocation, "current", lambda: Allocation("42", None, HERE))
    # Its head node lacks the interface of the nodes.
    config = RunConfig(launcher=LauncherConfig(name="mpirun", mpi="srun", interface="ib7"))
    found = launcher_of(config).rank_places(config, 5)
    assert (found.address, found.supervisor) == ("10.0.0.1", "10.0.0.9")
    assert (found.interface, found.ports) == ("ib7", (10042, 0, 0))
    assert found.ranks[0].prefix[0] == "srun"


def test_first_node_that_a_shell_of_salloc_does_not_find_is_named():
    nodes = (JobNode("n1", "a", "no.such.host"), HERE[1])
    with pytest.raises(RunError, match=r"rank 0 runs on node n1, .* start it there, or use launch"):
        Allocation("42", None, nodes).places(2, RunConfig(), elsewhere=True)


def test_loopback_between_hosts_is_refused_with_what_would_do(monkeypatch):
    monkeypatch.setattr(rank_places.network, "own_address_towards", lambda host: "127.0.1.1")
    with pytest.raises(RunError, match=r"n1 finds no address .* n2 .*launcher.interface=ib0"):
        places()


def test_host_that_no_network_leads_to_is_named(monkeypatch):
    def refuse(host):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(rank_places.network, "own_address_towards", refuse)
    with pytest.raises(RunError, match=r"n2 \(10.0.0.2\).*Network is unreachable"):
        places()


def test_named_interface_decides_the_address(monkeypatch):
    monkeypatch.setattr(rank_places.network, "address_of", {"ib0": "10.1.0.1"}.__getitem__)
    found = places(interface="ib0")
    assert (found.address, found.interface) == ("10.1.0.1", "ib0")


def test_nodes_are_read_from_slurm(monkeypatch):
    lines = "NodeName=n1 Arch=x NodeAddr=10.0.0.1 NodeHostName=a OS=Linux 6 #1\nNodeName=n2 Arch=x"
    monkeypatch.setattr(scheduler, "ask", lambda *command, most_s=None: f"{lines}\n")
    environ = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert allocation.current() == Allocation("9", None, (HERE[0], JobNode("n2", "n2", "n2")))
    for name, value in {"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    assert allocation.current().array == ("8", 3)


def test_cores_of_each_node_are_read_from_slurm(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "3,2(x2)")
    nodes = tuple(JobNode(name, "", "") for name in "abc")
    assert allocation.cores(Allocation("7", None, nodes)) == [3, 2, 2]
    assert allocation.cores(Allocation("7", None, nodes[:2])) == [0, 0]


def test_process_outside_of_a_job_is_told_so(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(RunError, match=r"sbatch job\.sbatch"):
        allocation.current()


@pytest.mark.parametrize(
    ("left", "reason", "patience_s"),
    [
        ("3:00", "timeout", 175),
        ("0:02", "timeout", 5),
        ("1:00:00", "preempted", 115),
        ("2-00:00:00", "preempted", 115),
        ("UNLIMITED", "preempted", 115),
        ("", "preempted", 115),
    ],
)
def test_little_time_left_means_a_time_limit(monkeypatch, left, reason, patience_s):
    monkeypatch.setattr(scheduler, "ask", lambda *command: f"{left}\n")
    making = Allocation("5", None, HERE).after_sigusr2(120)
    assert (making.reason, making.patience_s) == (reason, patience_s)


def test_command_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="scontrol is not installed here"):
        scheduler.ask("scontrol", "show")
