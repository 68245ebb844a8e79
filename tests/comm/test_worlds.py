"""Worlds and groups: ranks that begin, meet and end alike go on; others are named in time."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hires import comm, worker
from hires.comm.backends import rendezvous
from hires.comm.backends.rendezvous import WorldMeeting
from hires.core.errors import CommError, ConfigError
from hires.core.message_backends import BACKEND_FACTS, BackendFacts
from hires.core.ranks.world import World
from hires.core.store.file_names import SECRET, attempt_dir
from hires.plan.traffic import CALLED
from hires.plan.tuning_table import TuningTable
from tests.helpers.conformance import assert_late_and_left, late_for_a_group
from tests.helpers.patience import until
from tests.helpers.ranks import error_of, run_ranks
from tests.helpers.saved import make

WORLD = World(0, 2, 0, 2, "127.0.0.1", 29500, 0)


# ---- real ranks


def groups_of_a_mesh(world: World) -> list[Any]:
    """Returns, of four ranks in a mesh of two by two, the sums over its dims and over both."""
    comm.init(world=world, timeout_s=20)
    rendezvous.torch_world(world, 20)  # a mesh has groups of torch.distributed, too
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    found = []
    for part in (mesh["row"], mesh["column"], mesh):
        group, tensor = comm.new_group(part), torch.tensor([2**world.rank])
        comm.all_reduce(tensor, group=group)
        found.append((comm.get_process_group_ranks(group), comm.get_rank(group), int(tensor)))
    group, both = comm.new_group([3, 0]), torch.zeros(2, dtype=torch.int64)
    if group.index >= 0:
        comm.all_gather_into_tensor(both, torch.tensor([2**world.rank]), group)
        found.append((comm.get_process_group_ranks(group), comm.get_rank(group), both.tolist()))
    comm.shutdown()
    return found


@pytest.mark.dist
def test_groups_are_the_parts_of_a_device_mesh_and_ascend():
    first, *_, last = run_ranks(groups_of_a_mesh, 4)
    assert first == [([0, 2], 0, 5), ([0, 1], 0, 3), ([0, 1, 2, 3], 0, 15), ([0, 3], 0, [1, 8])]
    assert last == [([1, 3], 1, 10), ([2, 3], 1, 12), ([0, 1, 2, 3], 3, 15), ([0, 3], 1, [1, 8])]


def overlapping_groups(world: World) -> list[float]:
    """Returns the sums of this rank in groups that only their members make, each call compared."""
    comm.init(world=world, timeout_s=8, check="every")
    pairs = [ranks for ranks in ([0, 1], [0, 2], [0, 2]) if world.rank in ranks]
    groups, sums = [comm.new_group(ranks) for ranks in pairs], []
    for group in groups:
        tensor = torch.full((group.ranks[1] + 1,), 1.0 + world.rank)
        comm.all_reduce(tensor, group=group)
        sums.append(float(tensor[0]))
    same = [*enumerate([one for one in groups if one.ranks == [0, 2]], 1)]
    works = [  # groups of the same ranks have an order each
        comm.all_reduce(torch.ones(size), group=one, async_op=True)
        for size, one in (same if world.rank == 0 else reversed(same))
    ]
    for work in works:
        work.wait()
    factor = torch.distributed._make_nccl_premul_sum(1.0 / (1 + world.rank))
    tensor = torch.full((1,), 1.0 + world.rank)
    comm.all_reduce(tensor, factor)
    comm.shutdown()
    return [*sums, float(tensor)]


@pytest.mark.dist
def test_ranks_in_overlapping_groups_and_with_factors_of_their_own_call_the_same():
    assert run_ranks(overlapping_groups, 3) == [[3.0, 4.0, 4.0, 3.0], [3.0, 3.0], [4.0, 4.0, 3.0]]


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_late_member_of_a_group_is_named_and_groups_end_with_their_world(backend: str, tmp_path):
    """Without the other rank gloo waited for five times the limit, and MPI without end."""
    assert_late_and_left(run_ranks(late_for_a_group, 2, backend, str(tmp_path / "given up")))


def groups_come_and_go(world: World, path: str) -> tuple[bool, int]:
    """Returns whether a group waits for all to connect, and what is left of one that is kept."""
    comm.init(world=world, timeout_s=20)
    kept, connected = comm.new_group(range(3)), Path(path)

    class LateGloo(dist.ProcessGroupGloo):
        """A rank that has connected later than the others."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            time.sleep(0.5)
            connected.touch()

    before = weakref.ref(kept.handles["gloo"])
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 2:
            patch.setattr(dist, "ProcessGroupGloo", LateGloo)
        comm.destroy_group(comm.new_group(range(3)))  # which closes connections
    waits, freed = connected.exists(), comm.new_group(range(3))
    comm.destroy_group(freed), comm.destroy_group(freed)
    world_ends = error_of(lambda: comm.destroy_group(comm.default_world().all_ranks))
    assert "ends with shutdown" in world_ends
    assert "was destroyed" in error_of(lambda: comm.all_reduce(torch.ones(3), group=freed))
    comm.shutdown()
    gc.collect()
    return waits, len(kept.handles) + (before() is not None)


@pytest.mark.dist
def test_group_that_is_freed_at_once_breaks_no_other_and_all_end_with_their_world(tmp_path):
    assert run_ranks(groups_come_and_go, 3, str(tmp_path / "connected")) == [(True, 0)] * 3


def joins_again(world: World) -> list[float]:
    """Returns the sums of two worlds at one address; rank 0 leaves each later than rank 1."""
    sums = []
    for _ in range(2):
        comm.init(("gloo", "shm"), world=world, timeout_s=20)
        tensor = torch.full((4,), 1.0 + world.rank)
        comm.all_reduce(tensor, backend="shm")
        sums.append(float(tensor[0]))
        if world.rank == 0:
            time.sleep(0.3)
        comm.shutdown()
        gc.collect()  # a store may be in a cycle
    return sums


@pytest.mark.dist
def test_ranks_leave_and_join_again_though_rank_0_is_late():
    assert run_ranks(joins_again, 2) == [[3.0, 3.0]] * 2


def several_worlds(world: World) -> list[list[float]]:
    """Returns the sums of a rank in its worlds, under way in all of them at once.

    Ranks 0 and 1 are one world, 1 and 2 another one, and all three are the default.
    """
    comm.init(["gloo"], world=world, timeout_s=20, check="every")
    worlds, own = [comm.default_world()], torch.full((5,), 2.0**world.rank)
    for pair in ([0, 1], [1, 2]):
        if world.rank in pair:
            rank, address = pair.index(world.rank), (world.address, world.port)
            place = WorldMeeting(World(rank, 2, rank, 2, *address, 0), words=f"of ranks {pair}")
            worlds.append(comm.join_world(["gloo", "shm"], place, 20))
    totals, works = [own.clone() for _ in worlds], []
    for at in range(len(worlds))[:: -1 if world.rank == 1 else 1]:
        group = worlds[at].all_ranks
        works.append(comm.all_reduce(totals[at], group=group, async_op=True))
    for work in works:
        work.wait()
    for one in worlds:  # ranks are those of the group's world
        inner = comm.new_group([1, 0], world=one)
        assert inner.index == (one.rank if one.rank < 2 else -1)
    posts, got = [], torch.zeros(len(worlds) - 1)
    for at, one in enumerate(worlds[1:]):  # of two worlds in one batch
        peer = 1 - one.rank
        posts.append(comm.P2POp(torch.distributed.irecv, got[at], peer, one.all_ranks))
        posts.append(comm.P2POp(comm.isend, own[:1], peer, one.all_ranks))
    for handle in comm.batch_isend_irecv(posts):
        handle.wait()
    comm.shutdown()
    assert not any(one.is_joined for one in worlds)
    return [[float(total[0]) for total in totals], got.tolist()]


@pytest.mark.dist
def test_process_is_a_rank_of_several_worlds_at_once():
    assert run_ranks(several_worlds, 3) == [
        [[7.0, 3.0], [2.0]],
        [[7.0, 3.0, 6.0], [1.0, 4.0]],
        [[7.0, 6.0], [2.0]],
    ]


def stuck_in_a_second_world(world: World) -> list[str]:
    """Returns the errors of ranks whose calls differ in one of two worlds, and of the other one."""
    comm.init(["gloo"], world=world, timeout_s=20)
    place = WorldMeeting(world, words="other")
    place.part("start", 20)  # the limit is that of the calls
    other = comm.join_world(["gloo"], place, 3.0)
    comm.barrier()
    texts = [
        error_of(
            lambda: (
                comm.gather_texts("text", world=other)
                if world.rank
                else comm.all_reduce(torch.ones(2), group=other.all_ranks)
            )
        )
    ]
    total = torch.ones(2)
    texts.append(error_of(lambda: comm.all_reduce(total)))
    error_of(comm.shutdown)
    return [*texts, f"{total.tolist()}"]


@pytest.mark.dist
def test_ranks_that_exchange_texts_and_numbers_in_one_world_are_named_and_the_other_goes_on():
    """Texts were no calls, so what the other rank did instead was not known."""
    for error, other, total in run_ranks(stuck_in_a_second_world, 2):
        assert "all_reduce of 8 B float32 (sum) over gloo" in error
        assert "exchange of texts over the store" in error
        assert [other, total] == ["", "[2.0, 2.0]"]


def different_begins(world: World, names: list[str], plan: str, route: str) -> str:
    """Returns the error of ranks of which one has other backends, another plan or another table."""
    mine = (names, plan, route) if world.rank == 1 else (["gloo"], "same", "gloo")
    rules = [{"operations": ["all_reduce"], "route": mine[2]}]
    table = TuningTable.from_dict({"format": 2, "made": {}, "rules": rules, "default": "gloo"})
    return error_of(
        lambda: comm.init(mine[0], world=world, timeout_s=20, plan=mine[1], table=table)
    )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("backends", "plan", "route"),
    [
        (["gloo", "shm"], "same", "gloo"),
        (["gloo"], "other", "gloo"),
        (["gloo"], "same", "gloo:segmented:1KiB"),
    ],
)
def test_rank_that_begins_with_other_backends_another_plan_or_table_is_named_on_all(
    backends: list[str], plan: str, route: str
):
    facts = f"rank 1 has begun with backends {', '.join(backends)}; table "
    for error in run_ranks(different_begins, 3, backends, plan, route):
        assert error.startswith(facts)
        assert f"plan {plan}, and rank 0 with backends gloo" in error


def own_folders(world: World, folders: list[str]) -> str:
    """Returns the error of ranks that have a run folder each."""
    return error_of(lambda: worker.run_rank(Path(folders[world.rank]), world, False))


@pytest.mark.dist
def test_nodes_with_different_plans_end_with_the_rank_that_differs(tmp_path: Path):
    """Each node reads the plan itself, and ranks of two plans would wait for each other."""
    folders = [make(tmp_path, parallel={"tiles": tiles}) for tiles in ([2, 1], [1, 2])]
    for folder in folders:  # as a supervisor writes it
        attempt_dir(folder, 0).mkdir(exist_ok=True)
        secret = attempt_dir(folder, 0) / SECRET
        secret.touch(0o600)
        secret.write_text("of both nodes")
    for error in run_ranks(own_folders, 2, [str(folder) for folder in folders]):
        assert error.startswith("rank 1 has begun with backends gloo")
        assert "all ranks need the same" in error


TABLE = {
    "format": 2,
    "made": {},
    "rules": [
        {"operations": ["send"], "max_ranks": 2, "same_node": True, "route": "shm"},
        {"operations": ["all_gather"], "route": "shm"},
        {"operations": ["all_reduce"], "route": "shm:flat"},
    ],
    "default": "gloo",
}


def through_a_table_of_plans(world: World) -> list[Any]:
    """Returns the error of a table with a backend that is not in use, and where messages went."""
    table = TuningTable.from_dict(TABLE)
    refused = error_of(lambda: comm.init(["gloo"], world=world, timeout_s=20, table=table))
    comm.init(["gloo", "shm"], world=world, timeout_s=20, table=table)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got, all_of_them, total = torch.zeros(1), torch.zeros(world.size), torch.ones(2000)
    handle = comm.isend(torch.tensor([float(world.rank)]), right)
    comm.recv(got, left)
    handle.wait()
    comm.all_gather_into_tensor(all_of_them, got)
    comm.all_reduce(total)
    backends = {
        CALLED[key[0]]: call.backend for key, call in comm.default_world().all_ranks.calls.items()
    }
    comm.shutdown()
    return [refused, all_of_them.tolist(), float(total.sum()), backends]


@pytest.mark.dist
def test_table_of_plans_has_the_same_meaning_outside_of_them():
    refused, gathered, total, backends = run_ranks(through_a_table_of_plans, 3)[0]
    assert refused.startswith("the tuning table names shm, and this world begins with gloo; add ")
    assert (gathered, total) == ([2.0, 0.0, 1.0], 6000)
    calls = ("send", "recv", "all_gather", "all_reduce")
    assert {name: backends[name] for name in calls} == dict.fromkeys(calls, "shm")


def absent_from_patience(world: World, over: str) -> str:
    """Returns the error of rank 0, which waits patiently for a rank that does something else."""
    comm.init(["gloo"], world=world, timeout_s=1.0)
    if world.rank > 0:
        until(Path(over).exists)
        return ""
    error = error_of(lambda: comm.max_all(0, patient=True))
    Path(over).touch()
    return error


@pytest.mark.dist
def test_patience_with_slow_disks_does_not_wait_an_hour_for_a_rank_that_does_not_come(tmp_path):
    error, _ = run_ranks(absent_from_patience, 2, str(tmp_path / "over"), timeout_s=60)
    assert "rank 1" in error


def late_in_patience(world: World) -> int:
    """Returns what the ranks agree on; rank 1 is busy with a file for longer than the limit."""
    comm.init(["gloo"], world=world, timeout_s=1.0)
    comm.max_all(0, patient=True)
    time.sleep(2.0 * world.rank)
    largest = comm.max_all(world.rank, patient=True)
    comm.shutdown()
    return largest


@pytest.mark.dist
def test_rank_at_a_large_file_may_take_longer_than_the_limit():
    assert run_ranks(late_in_patience, 2) == [1, 1]


def test_rank_whose_second_backend_fails_waits_for_no_other(monkeypatch):
    """The end of MPI waited without limit for ranks that had joined both."""
    ends = list[str]()

    def fail(*_: object) -> None:
        raise CommError("no room")

    joined = SimpleNamespace(
        join=lambda *_: None,
        is_initialized=lambda: not ends,
        destroy_process_group=lambda: ends.append("together"),
        abort=lambda: ends.append("alone"),
    )
    for name, made in (("mpi", joined), ("shm", SimpleNamespace(join=fail))):
        kind = type("Kind", (), {"is_alone": True, "__new__": lambda _, made=made: made})
        monkeypatch.setitem(BACKEND_FACTS._items, name, BackendFacts("", lambda kind=kind: kind))
    with pytest.raises(CommError, match="no room"):
        comm.init(["mpi", "shm"], world=WORLD, timeout_s=1.0)
    assert ends == ["alone"]
    assert not comm.is_initialized()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"check": "never"}, "unknown check 'never'; choose one of off, late, every"),
        *(({"backends": one}, "no list of names") for one in ([], None, {"gloo"}, "gloo", [3])),
        *(({"timeout_s": one}, "limit of .* s is none") for one in ("5", None, True, 0, -1, 1e300)),
        ({"timeout_s": float("nan")}, "a limit of nan s is none; give a number over 0"),
        ({"backends": ["gloo:nope"]}, "unknown .* 'gloo:nope'"),
    ],
)
def test_arguments_of_a_start_that_cannot_be_meant_are_refused(given: Any, words: str):
    with pytest.raises((CommError, ConfigError), match=words):
        comm.init(**{"backends": ["gloo"], "world": WORLD, **given})
    assert not comm.is_initialized()


@pytest.mark.parametrize(
    ("local_size", "address", "named", "interface"),
    [
        (2, "10.0.0.1", None, "eth7"),  # the one that leads to the first machine
        (4, "10.0.0.1", None, None),  # ranks of one machine
        (2, "10.0.0.1", "ib0", "ib0"),  # the user's
        (2, "10.9.9.9", None, None),  # left to the library
    ],
)
def test_ranks_on_several_machines_talk_over_the_network_that_joins_them(
    local_size, address, named, interface, monkeypatch
):
    monkeypatch.setattr(rendezvous, "interface_towards", {"10.0.0.1": "eth7"}.get)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    rendezvous.choose_interface(World(0, 4, 0, local_size, address, 29500, 0))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
