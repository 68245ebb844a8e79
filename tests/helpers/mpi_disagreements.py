"""What ranks do in tests of MPI whose programs are wrong: they disagree, or ask what it lacks."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from hires import comm
from hires.comm.transport import transport
from hires.core.errors import CommError
from hires.core.ranks.world import World
from tests.helpers.patience import until


def refusals(world: World, folder: str) -> list[str]:
    """Returns the errors of rank 0: of what cannot be sent, and of a rank that never answers."""
    comm.init(["mpi"], world=world, timeout_s=1.0, shared_memory=False)
    done, errors = Path(folder) / "done", []
    if world.rank != 0:
        until(done.exists)
        return []
    big = torch.zeros(3_000_000)
    for begin in (
        lambda: comm.irecv(torch.zeros(2), 1, tag=5).wait(),
        lambda: comm.isend(big, 1, tag=6).wait(),
        lambda: comm.barrier(),
        lambda: transport.backend.isend(torch.zeros(4, 4).t(), 1),
        lambda: transport.backend.all_reduce(torch.zeros(2, dtype=torch.complex64)),
        lambda: transport.backend.isend(torch.zeros(2), 1, tag=-1),
    ):
        try:
            begin()
            errors.append("no error")
        except (CommError, ValueError) as error:
            errors.append(str(error))
    done.touch()
    return errors


def rows_of_another_number(world: World) -> str:
    """Returns the error of an exchange in which rank 0 expects 3 rows of rank 1, which sends 2."""
    comm.init(["mpi"], world=world, timeout_s=20, shared_memory=False)
    taken, sizes = torch.zeros(4 + (world.rank == 0)), [2, 2 + (world.rank == 0)]
    error = ""
    try:
        comm.all_to_all_single(taken, torch.ones(4), sizes, [2, 2])
    except CommError as failed:
        error = str(failed)
    comm.shutdown()
    return error


def different_calls(world: World) -> list[str]:
    """Returns what faulty programs raise: large calls of different operation, root and size."""
    comm.init(["mpi"], world=world, timeout_s=60, shared_memory=False)
    transport.backends["mpi"]._may_block = True
    large, rank = 2**18, world.rank
    programs = {
        "operation": lambda x, group: (
            comm.broadcast(x, 0, group) if rank else comm.all_reduce(x, group=group)
        ),
        "root": lambda x, group: comm.broadcast(x, rank, group),
        "size": lambda x, group: comm.all_reduce(x[: large // (1 + rank)], group=group),
        "does not meet": lambda x, group: comm.all_reduce(x[: large >> 10 * rank], group=group),
    }
    raised = []
    # Each has a group of its own: it leaves open what the others would match.
    groups = [comm.new_group([0, 1], timeout=1.0) for _ in programs]
    for name, group in zip(programs, groups, strict=True):
        begin_s = time.monotonic()
        try:
            programs[name](torch.ones(large), group)
        except CommError as error:
            raised.append(f"{name}: {error}")
        assert time.monotonic() - begin_s < 20
        comm.barrier()  # no thread of a rank is inside the library, with its lock
    return raised


def other_sizes(world: World, sent: int, taken: int) -> tuple[str, str]:
    """Returns what a receive of another size says, and the end of the world; rank 0 ends first."""
    comm.init(["mpi"], world=world, timeout_s=20)
    first = last = ""
    if world.rank == 0:
        comm.send(torch.ones(sent, dtype=torch.uint8), 1)
    else:
        time.sleep(0.2)
        try:
            comm.recv(torch.zeros(taken, dtype=torch.uint8), 0)
        except CommError as error:
            first = str(error)
    try:
        comm.shutdown()
    except CommError as error:
        last = str(error)
    return first, last


def different_groups(world: World) -> list[str]:
    """Returns how the making of groups ends: alike, of other ranks on rank 1, and alike again."""
    comm.init(["mpi"], world=world, timeout_s=60)
    told = []
    for ranks in ([0, 2], [1, 2] if world.rank == 1 else [0, 2], [0, 1, 2]):
        try:
            told.append(repr(comm.new_group(ranks).ranks))
        except CommError as error:
            told.append(str(error))
    comm.shutdown()
    return told
