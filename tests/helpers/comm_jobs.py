"""Gathers, sums and agreements of ranks, also of late and silent ones."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from pathlib import Path

import torch

from hires import comm
from hires.comm import divided_sums
from hires.comm.backends import attach
from hires.comm.transport import transport
from hires.core.errors import CommError, HiresError
from hires.core.ranks import memory_files
from hires.core.ranks.timeline import Recorder
from hires.core.ranks.world import World
from tests.helpers.patience import until


def gather_of_rank(world: World, num_elements: int, shared: bool) -> list[float]:
    """Returns the gathered first elements of tensors that hold the rank's number."""
    comm.init(world=world, timeout_s=60, shared_memory=shared)
    [group] = comm.make_groups([list(range(world.size))], 1).values()
    gathered = comm.all_gather_stacked(torch.full((num_elements,), float(world.rank)), group)
    total = torch.full((3,), float(world.rank))
    comm.all_reduce(total, group=group)
    comm.shutdown()
    return [*gathered[:, -1].tolist(), total[0].item()]


def labels_of_rank(world: World) -> list[str]:
    """Returns what the time line calls a gather and a sum."""
    comm.init(world=world, timeout_s=60)
    [group] = comm.make_groups([list(range(world.size))], 1).values()
    group.recorder = Recorder()
    group.recorder.begin_step()
    group.recorder.action = "F0"
    comm.all_gather_stacked(torch.zeros(2), group)
    comm.all_reduce(torch.zeros(2), group=group)
    comm.shutdown()
    return [span.what for span in group.recorder.steps[-1].spans]


def agreement_of_rank(world: World) -> tuple[int, int, list[str]]:
    """Returns what ranks agreed on, without and with patience, and what rank 0 told them."""
    comm.init(world=world, timeout_s=60)
    number = comm.max_all(world.rank)
    assert comm.sum_all(world.rank + 0.5) == world.size**2 / 2
    patient = comm.max_all(7 - world.rank, patient=True)
    told = [comm.broadcast_text(text) for text in (f"r\u00e4nk {world.rank} of {world.size}", "")]
    comm.shutdown()
    return number, patient, told


def sums_of_rank(
    world: World, sizes: list[int], way: str
) -> tuple[bool, list[list[float]], list[int]]:
    """Returns whether ranks read each other's memory, sums of tensors, and sizes of messages."""
    if way == "forbidden":
        attach._reader = lambda: None
    comm.init(world=world, timeout_s=60, shared_memory=way != "sent")
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
    return group.peers is not None, [tensor.flatten().tolist() for tensor in tensors], messages


def many_gathers(world: World, rounds: int) -> int:
    """Gathers again and again, each rank late in turn; returns how many answers were wrong."""
    comm.init(world=world, timeout_s=60)
    [group] = comm.make_groups([list(range(world.size))], 1).values()
    assert group.shared is not None, "this machine should share memory"
    chance = random.Random(world.rank)
    wrong = 0
    for number in range(rounds):
        if chance.random() < 0.1:
            time.sleep(chance.random() / 200)
        gathered = comm.all_gather_stacked(torch.tensor([[number, world.rank]]), group)
        expected = [[[number, rank]] for rank in range(world.size)]
        wrong += gathered.tolist() != expected
    comm.shutdown()
    return wrong


def late_gather(world: World, done: Path) -> str:
    """Rank 1 never comes to a gather; returns what rank 0 is told."""
    comm.init(world=world, timeout_s=60)
    transport.timeout_s = 0.5  # of the group's waits
    [group] = comm.make_groups([[0, 1]], 1).values()
    if world.rank == 1:
        until(done.exists)
        return ""
    try:
        comm.all_gather_stacked(torch.zeros(2), group)
    except CommError as error:
        return str(error)
    finally:
        done.touch()
    return "no error"


def uneven_gather(world: World) -> str:
    """Ranks 1 and 2 gather tensors of two sizes through memory; returns what they are told."""
    comm.init(world=world, timeout_s=60)
    made = comm.make_groups([[1, 2]], 1)
    text = ""
    if made:
        assert made[0].shared is not None
        try:
            comm.all_gather_stacked(torch.zeros(1 + world.rank, dtype=torch.float64), made[0])
        except CommError as error:
            text = str(error)
        gathered = comm.all_gather_stacked(torch.tensor([world.rank]), made[0])
        assert gathered.tolist() == [[1], [2]]
    with contextlib.suppress(CommError):
        comm.shutdown()
    return text


def silent_peer(world: World) -> str:
    """Rank 1 never answers; returns what rank 0 is told."""
    comm.init(world=world, timeout_s=3)
    if world.rank == 1:
        time.sleep(6)
        return ""
    try:
        comm.irecv(torch.empty(3), 1, tag=5).wait()
    except CommError as error:
        return str(error)
    return "no error"


def no_room(world: World) -> str:
    """Returns how making a group ends where the shared memory is full."""
    comm.init(world=world, timeout_s=60)
    memory_files.free_bytes = lambda: 10**5
    try:
        comm.make_groups([[0, 1]], num_close=1)
    except HiresError as error:
        return str(error)
    return "it was made"


def divided_parts(world: World) -> tuple[list[str], str, bool]:
    """Returns what is wrong with sums and gathers of parts, and the error of two that differ.

    And whether ranks read each other's memory, without which none differ there.
    """
    comm.init(world=world, timeout_s=4)
    [group] = comm.make_groups([[*range(world.size)]]).values()
    divided_sums.BUFFER_BYTES = 64  # several buffers
    wrong: list[str] = []
    for among in (group, dataclasses.replace(group, peers=None)):
        for sizes in ([[3, 5, 2], [0, 9, 1]], [[], [7]], [[4], [4]]):
            before = [_parts_of(sizes, rank) for rank in range(world.size)]
            sums = [
                [sum(terms) for terms in zip(*own, strict=True)]
                for own in zip(*before, strict=True)
            ]
            parts = _parts_of(sizes, world.rank)
            expected = [*before[world.rank]]
            expected[world.rank] = sums[world.rank]
            comm.reduce_scatter_coalesced(parts, among)
            wrong += [f"sum of {sizes}"] * (not _same(parts, expected))
            comm.all_gather_coalesced(parts, among)
            wrong += [f"gather of {sizes}"] * (not _same(parts, sums))
    text, differ = "", comm.all_gather_coalesced if world.rank else comm.reduce_scatter_coalesced
    if group.peers is not None:
        try:
            differ([[torch.ones(4, dtype=torch.float64)] for _ in range(world.size)], group)
        except CommError as error:
            text = str(error)
    with contextlib.suppress(CommError):
        comm.shutdown()
    return wrong, text, group.peers is not None


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
