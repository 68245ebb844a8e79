"""What ranks do in tests of the memory that they share: gathers, sums, late and dead ranks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import torch

from hires import comm
from hires.comm import divided_sums
from hires.comm.transport import transport
from hires.core.errors import CommError, HiresError
from hires.core.ranks import memory_files
from hires.core.ranks.world import World
from hires.plan.routes import Route
from tests.helpers.patience import PATIENCE_S


def many_gathers(world: World, rounds: int) -> tuple[int, str]:
    """Gathers again and again, each rank late in turn; returns how many answers were wrong.

    And what ranks 1 and 2 are told of a gather of tensors of two sizes.
    """
    comm.init(world=world, timeout_s=60)
    groups = comm.make_groups([[*range(world.size)], [1, 2]], 2)
    assert groups[0].shared is not None, "this machine should share memory"
    chance, wrong, told = random.Random(world.rank), 0, ""
    for number in range(rounds):
        if chance.random() < 0.1:
            time.sleep(chance.random() / 200)
        gathered = comm.all_gather_stacked(torch.tensor([[number, world.rank]]), groups[0])
        wrong += gathered.tolist() != [[[number, rank]] for rank in range(world.size)]
    large = comm.all_gather_stacked(torch.full((100_000,), float(world.rank)), groups[0])
    wrong += large[:, -1].tolist() != [*range(world.size)]
    if world.rank:
        try:
            comm.all_gather_stacked(torch.zeros(1 + world.rank, dtype=torch.float64), groups[1])
        except CommError as error:
            told = str(error)
        gathered = comm.all_gather_stacked(torch.tensor([world.rank]), groups[1])
        wrong += gathered.tolist() != [[1], [2]]
    with contextlib.suppress(CommError):
        comm.shutdown()
    return wrong, told


def sums_of_rank(world: World, sizes: list[int]) -> tuple[list[list[float]], list[int]]:
    """Returns the sums of tensors, and the sizes of messages."""
    comm.init(["shm"], world=world, timeout_s=60)
    everybody = [[*range(world.size)]]
    group = comm.make_groups(everybody)[0]
    generator = torch.Generator().manual_seed(world.rank)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors += [torch.full((3, 5), world.rank + 0.5, dtype=torch.float64)]
    messages: list[int] = []
    backend = transport.backend
    all_reduce = backend.all_reduce
    backend.all_reduce = lambda sent, *args, **named: (
        messages.append(sent.numel()) or all_reduce(sent, *args, **named)
    )
    comm.all_reduce_coalesced(tensors, group)
    comm.barrier()
    comm.shutdown()
    return [tensor.flatten().tolist() for tensor in tensors], messages


def no_room(world: World) -> str:
    """Returns how making a group ends where the shared memory is full."""
    comm.init(world=world, timeout_s=60)
    memory_files.free_bytes = lambda: 10**5
    try:
        comm.make_groups([[0, 1]], num_close=1)
    except HiresError as error:
        return str(error)
    return "it was made"


def divided_parts(world: World) -> list[str]:
    """Returns what is wrong with sums and gathers of parts."""
    comm.init(["gloo", "shm"], world=world, timeout_s=60)
    [group] = comm.make_groups([[*range(world.size)]]).values()
    divided_sums.BUFFER_BYTES = 64  # several buffers
    wrong: list[str] = []
    for backend in (None, Route("shm")):
        for sizes in ([[3, 5, 2], [0, 9, 1]], [[], [7]], [[4], [4]]):
            before = [_parts_of(sizes, rank) for rank in range(world.size)]
            sums = [
                [sum(terms) for terms in zip(*own, strict=True)]
                for own in zip(*before, strict=True)
            ]
            parts = _parts_of(sizes, world.rank)
            expected = [*before[world.rank]]
            expected[world.rank] = sums[world.rank]
            comm.reduce_scatter_coalesced(parts, group, backend=backend)
            wrong += [f"sum of {sizes}"] * (not _same(parts, expected))
            comm.all_gather_coalesced(parts, group, backend=backend)
            wrong += [f"gather of {sizes}"] * (not _same(parts, sums))
    comm.shutdown()
    return wrong


def _same(parts: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(one, other)
        for own, others_own in zip(parts, others, strict=True)
        for one, other in zip(own, others_own, strict=True)
    )


def _parts_of(sizes: list[list[int]], rank: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        [torch.randn(size, generator=generator, dtype=torch.float64) for size in own]
        for own in sizes
    ]


def killed(world: World, backends: list[str]) -> list[str]:
    """Returns how each kind of wait ended for a rank whose peer was killed in the meantime."""
    if world.rank == 1:  # a process of its own, so that this one can answer
        if not (child := os.fork()):
            comm.init(backends, world=world, timeout_s=60)
            comm.new_group()
            comm.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        return []
    comm.init(backends, world=world, timeout_s=PATIENCE_S)
    group = comm.new_group()
    comm.barrier()
    time.sleep(0.2)
    numbers, told = torch.zeros(100_000), []
    for wait in (
        lambda: comm.recv(torch.zeros(1), 1),
        lambda: comm.send(numbers, 1),
        lambda: comm.all_reduce(numbers, group=group),
        lambda: comm.all_reduce(numbers, async_op=True).wait(),
    ):
        try:
            wait()
            told.append("nothing")
        except CommError as error:
            told.append(str(error))
    comm.shutdown()
    return told
