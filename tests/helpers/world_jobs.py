"""What ranks do in tests of worlds and groups: how they begin, agree, disagree and end."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from hires import comm, worker
from hires.comm.backends import rendezvous
from hires.comm.transport import transport
from hires.core.errors import CommError, ConfigError
from hires.core.ranks.world import World
from hires.plan.tuning_table import TuningTable


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


def overlapping_groups(world: World) -> list[float]:
    """Returns the sums of this rank in groups that only their members make, each call compared."""
    comm.init(world=world, timeout_s=8, check="every")
    groups = [
        comm.new_group(ranks, members_only=True)
        for ranks in ([0, 1], [0, 2], [0, 2], [2])
        if world.rank in ranks
    ]
    found = []
    for number, group in enumerate(one for one in groups if one.size > 1):
        tensor = torch.full((group.ranks[1] + 1,), 1.0 + world.rank)
        if number == 2 or (world.rank == 2 and number == 1):
            comm.broadcast(tensor, 2, group)
            found.append(float(tensor[0]) + 2)
        else:
            comm.all_reduce(tensor, group=group)
            found.append(float(tensor[0]))
    if world.rank == 2:
        comm.all_reduce(torch.ones(1), group=groups[-1])
    pairs = [*enumerate([one for one in groups if one.ranks == [0, 2]], 1)]
    works = [  # groups of the same ranks have an order each
        comm.all_reduce(torch.ones(size), group=one, async_op=True)
        for size, one in (pairs if world.rank == 0 else reversed(pairs))
    ]
    for work in works:
        work.wait()
    factor = torch.distributed._make_nccl_premul_sum(1.0 / (1 + world.rank))
    tensor = torch.full((1,), 1.0 + world.rank)
    comm.all_reduce(tensor, factor)
    assert float(tensor) == 3.0
    comm.shutdown()
    return found


def joins_again(world: World) -> list[float]:
    """Returns the sums of three worlds at one address; rank 0 leaves each later than rank 1."""
    sums = []
    for _ in range(3):
        comm.init(("gloo", "shm"), world=world, timeout_s=20)
        tensor = torch.full((4,), 1.0 + world.rank)
        comm.all_reduce(tensor, backend="shm")
        sums.append(float(tensor[0]))
        if world.rank == 0:
            time.sleep(0.3)
        comm.shutdown()
        gc.collect()  # a store may be in a cycle
    return sums


def late_wait(world: World) -> list[str]:
    """Returns what rank 0 learns of a receive that is late, and of a group that is not its own."""
    comm.init(world=world, timeout_s=20)
    pair = comm.new_group([1, 2])
    errors, tensor = [], torch.ones(3)
    if world.rank == 0:
        handle = comm.irecv(tensor, 1, tag=4)
        assert handle.is_completed() is False
        for call in (lambda: handle.wait(0.05), lambda: comm.all_reduce(tensor, group=pair)):
            try:
                call()
                errors.append("no error")
            except CommError as error:
                errors.append(str(error))
        assert handle.exception() is None
    comm.barrier()  # only now is the message sent
    if world.rank == 1:
        comm.send(torch.full((3,), 5.0), 0, tag=4)
    if world.rank == 0:
        handle.wait(10)
        errors.append(f"{handle.is_completed()} {tensor.tolist()}")
    comm.shutdown()
    return errors


TABLE = {
    "format": 1,
    "made": {},
    "rules": [
        {"operation": "send", "ranks": 2, "ranks_per_node": 2, "route": "shm:mailbox"},
        {"operation": "all_gather", "route": "shm:slots"},
        {"operation": "all_reduce", "route": "shm:flat"},
    ],
    "default": "gloo",
}
"""One as a plan has it, whose algorithms are those of plans."""


def through_a_table_of_plans(world: World) -> list[Any]:
    """Returns the error of a table with a backend that is not in use, and where messages went."""
    table, found = TuningTable.from_dict(TABLE), []
    try:
        comm.init(["gloo"], world=world, timeout_s=20, table=table)
    except ConfigError as error:
        found.append(str(error))
    comm.init(["gloo", "shm"], world=world, timeout_s=20, table=table)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got, all_of_them, total = torch.zeros(1), torch.zeros(world.size), torch.ones(2000)
    handle = comm.isend(torch.tensor([float(world.rank)]), right)
    comm.recv(got, left)
    handle.wait()
    comm.all_gather_into_tensor(all_of_them, got)
    comm.all_reduce(total)
    backends = {key[0]: call.backend for key, call in transport.world.calls.items()}
    comm.shutdown()
    return [*found, all_of_them.tolist(), float(total.sum()), backends]


def different_begins(world: World, names: list[str], plan: str, route: str) -> str:
    """Returns the error of ranks of which one has other backends, another plan or another table."""
    mine = (names, plan, route) if world.rank == 1 else (["gloo"], "same", "gloo")
    rules = [{"operation": "all_reduce", "route": mine[2]}]
    table = TuningTable.from_dict({"format": 1, "made": {}, "rules": rules, "default": "gloo"})
    try:
        comm.init(mine[0], world=world, timeout_s=20, plan=mine[1], table=table)
    except CommError as error:
        return str(error)
    return "no error"


def own_folders(world: World, folders: list[str]) -> str:
    """Returns the error of ranks that have a run folder each."""
    try:
        worker.run_rank(Path(folders[world.rank]), world, False)
    except CommError as error:
        return str(error)
    return "no error"


def absent_from_patience(world: World, over: str) -> str:
    """Returns the error of rank 0, which waits patiently for a rank that does something else."""
    comm.init(["gloo"], world=world, timeout_s=2.0)
    if world.rank > 0:
        while not Path(over).exists():
            time.sleep(0.02)
        return ""
    try:
        comm.max_all(0, patient=True)
    except CommError as error:
        return str(error)
    finally:
        Path(over).touch()
    return "no error"
