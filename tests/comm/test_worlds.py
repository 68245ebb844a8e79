"""Worlds and groups: ranks that begin, meet and end alike go on; others are named in time."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hires import comm
from hires.comm import membership
from hires.comm.backends import known_backends
from hires.comm.backends.known_backends import BACKENDS
from hires.comm.rehearsal import SilentBackend
from hires.comm.transport import Transport, transport
from hires.core.config.comm_config import CommConfig
from hires.core.errors import CommError
from hires.core.ranks.world import World
from hires.core.store.file_names import SECRET, attempt_dir
from tests.helpers import world_jobs
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import make

WORLD = World(0, 2, 0, 2, "127.0.0.1", 29500, 0)


# ---- real ranks


@pytest.mark.dist
def test_groups_are_the_parts_of_a_device_mesh_and_ascend():
    first, *_, last = run_ranks(world_jobs.groups_of_a_mesh, 4)
    assert first == [([0, 2], 0, 5), ([0, 1], 0, 3), ([0, 1, 2, 3], 0, 15), ([0, 3], 0, [1, 8])]
    assert last == [([1, 3], 1, 10), ([2, 3], 1, 12), ([0, 1, 2, 3], 3, 15), ([0, 3], 1, [1, 8])]


@pytest.mark.dist
def test_ranks_in_overlapping_groups_and_with_factors_of_their_own_call_the_same():
    assert run_ranks(world_jobs.overlapping_groups, 3) == [[3.0, 4.0, 5.0], [3.0], [4.0, 5.0]]


@pytest.mark.dist
def test_ranks_leave_and_join_again_though_rank_0_is_late():
    assert run_ranks(world_jobs.joins_again, 2) == [[3.0, 3.0, 3.0]] * 2


@pytest.mark.dist
def test_late_wait_leaves_the_operation_under_way():
    late, stranger, arrived = run_ranks(world_jobs.late_wait, 3)[0]
    assert late.startswith("a receive from rank 1 over gloo failed: it took over 0.05 s")
    assert stranger == "this rank is not among ranks [1, 2], and uses their group"
    assert arrived == "True [5.0, 5.0, 5.0]"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("backends", "plan", "route"),
    [
        (["gloo", "null"], "same", "gloo"),
        (["gloo"], "other", "gloo"),
        (["gloo"], "same", "gloo:segmented:1KiB"),
    ],
)
def test_rank_that_begins_with_other_backends_another_plan_or_table_is_named_on_all(
    backends: list[str], plan: str, route: str
):
    facts = f"rank 1 has begun with backends {', '.join(backends)}; table "
    for error in run_ranks(world_jobs.different_begins, 3, backends, plan, route):
        assert error.startswith(facts)
        assert f"plan {plan}, and rank 0 with backends gloo" in error


@pytest.mark.dist
def test_nodes_with_different_plans_end_with_the_rank_that_differs(tmp_path: Path):
    """Each node reads the plan itself, and ranks of two plans would wait for each other."""
    folders = [make(tmp_path, parallel={"tiles": tiles}) for tiles in ([2, 1], [1, 2])]
    for folder in folders:  # as a supervisor writes it
        attempt_dir(folder, 0).mkdir(exist_ok=True)
        secret = attempt_dir(folder, 0) / SECRET
        secret.touch(0o600)
        secret.write_text("of both nodes")
    for error in run_ranks(world_jobs.own_folders, 2, [str(folder) for folder in folders]):
        assert error.startswith("rank 1 has begun with backends gloo")
        assert "all ranks need the same" in error


@pytest.mark.dist
def test_table_of_plans_has_the_same_meaning_outside_of_them():
    refused, gathered, total, backends = run_ranks(world_jobs.through_a_table_of_plans, 3)[0]
    assert refused.startswith("the tuning table names shm, and this world begins with gloo; add ")
    assert (gathered, total) == ([2.0, 0.0, 1.0], 6000)
    calls = ("isend", "irecv", "all_gather_into_tensor", "all_reduce")
    assert {name: backends[name] for name in calls} == dict.fromkeys(calls, "shm")


@pytest.mark.dist
def test_patience_with_slow_disks_does_not_wait_an_hour_for_a_rank_that_does_not_come(tmp_path):
    error, _ = run_ranks(world_jobs.absent_from_patience, 2, str(tmp_path / "over"), timeout_s=60)
    assert "rank 1" in error


# ---- one rank, with stand-ins for backends


class Doubling(SilentBackend):
    """A world of equal ranks: a sum over two of them doubles."""

    def all_reduce(
        self, tensor: Tensor, op: object = None, group: object = None, async_op: bool = False
    ) -> object:
        return super().all_reduce(tensor.mul_(2), op, group, async_op)


@pytest.fixture
def own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS, "_items", dict(BACKENDS._items))
    for name, value in vars(Transport()).items():
        monkeypatch.setattr(transport, name, value)


@pytest.mark.usefixtures("own_backends")
def test_backend_that_was_registered_carries_messages_and_frees_its_groups(monkeypatch):
    freed: list[object] = []
    monkeypatch.setattr(Doubling, "destroy_group", lambda _, group: freed.append(group))
    BACKENDS.register("doubling")(lambda world, timeout_s: Doubling(world.rank, False))
    comm.init(["doubling"], world=WORLD, timeout_s=1.0)
    group, tensor = comm.new_group([0, 1]), torch.ones(3)
    handle = group.handles["doubling"]
    comm.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    comm.destroy_group(group)
    comm.destroy_group(group)
    assert freed == [handle]
    with pytest.raises(CommError, match=r"ranks \[0, 1\] was destroyed"):
        comm.all_reduce(torch.ones(3), group=group)
    with pytest.raises(CommError, match="ends with shutdown"):
        comm.destroy_group(transport.world)


class Joined:
    """A backend that records how it is left."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def is_initialized(self) -> bool:
        return not self.ends

    def destroy_process_group(self) -> None:
        self.ends.append("together")

    def abort(self) -> None:
        self.ends.append("alone")


def test_rank_whose_second_backend_fails_waits_for_no_other(monkeypatch):
    """The end of MPI waited without limit for ranks that had joined both."""
    joined = Joined()

    def fail(world: World, timeout_s: float) -> None:
        raise CommError("no room")

    backends = {"mpi": lambda world, timeout_s: joined, "shm": fail}
    monkeypatch.setattr(membership, "BACKENDS", backends)
    with pytest.raises(CommError, match="no room"):
        comm.init(["mpi", "shm"], world=WORLD, timeout_s=1.0)
    assert joined.ends == ["alone"]
    assert not comm.is_initialized()


def test_backends_of_the_config_are_there():
    [chosen] = [one for one in fields(CommConfig) if one.name == "backend"]
    assert {*chosen.metadata["choices"]} - {"auto"} <= {*BACKENDS}


@pytest.mark.parametrize(
    ("local_size", "address", "named", "interface"),
    [
        (2, "10.0.0.1", None, "eth7"),  # the one that leads to the first machine
        (4, "10.0.0.1", None, None),  # ranks of one machine
        (2, "10.0.0.1", "ib0", "ib0"),  # the user's
        (2, "10.9.9.9", None, None),  # left to the transport
    ],
)
def test_ranks_on_several_machines_talk_over_the_network_that_joins_them(
    local_size, address, named, interface, monkeypatch
):
    monkeypatch.setattr(known_backends, "interface_towards", {"10.0.0.1": "eth7"}.get)
    monkeypatch.setattr(known_backends.GlooBackend, "join", lambda *_: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    BACKENDS["gloo"](World(0, 4, 0, local_size, address, 29500, 0), 1.0)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
