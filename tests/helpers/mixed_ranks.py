"""Runs the random programs of :mod:`tests.helpers.mixed_programs` on real ranks."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import torch

from hires import comm
from hires.comm.backends import rendezvous
from hires.core.errors import HiresError
from hires.core.ranks.world import World
from tests.helpers.mixed_programs import CommProgram, random_program, seed_bug
from tests.helpers.patience import PATIENCE_S
from tests.helpers.program_rank import ProgramRank

TIMEOUT_S = 30.0
BROKEN_TIMEOUT_S = 3.0
STEPS, SMALL = 8, 2**14  # of programs with a mistake
BATCH = 100
BATCHES = [(n, 400 * (n - 2) + BATCH * at) for n in (2, 3, 4) for at in range(4)]
"""Ranks and first seed of the tests of many programs, each of BATCH and with a limit of its own."""


def mixed_of_rank(
    world: World, backends: tuple[str, ...], seeds: range, num_steps: int, largest: int
) -> int:
    """Returns how many random programs gave the reference result on this rank."""
    comm.init(backends, world=world, timeout_s=TIMEOUT_S)
    groups: dict[tuple[int, ...], Any] = {(*range(world.size),): None}
    for size in range(2, world.size):
        for ranks in itertools.combinations(range(world.size), size):
            groups[ranks] = comm.new_group([*ranks])
    for seed in seeds:
        program = random_program(random.Random(seed), world.size, backends, num_steps, largest)
        try:
            ProgramRank(program, world.rank, groups).run()
        except (AssertionError, HiresError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    comm.barrier()
    comm.shutdown()
    return len(seeds)


def broken_of_rank(
    world: World, backends: tuple[str, ...], bug: str, seed: int, check: str = "late"
) -> str:
    """Returns what a rank says of a program with a mistake; empty: nothing."""
    made = random_program(random.Random(seed), world.size, backends, STEPS, SMALL)
    broken = seed_bug(random.Random(seed), made, bug)
    assert broken is not None
    _meet(world)
    comm.init(backends, world=world, timeout_s=BROKEN_TIMEOUT_S, check=check)
    groups: dict[tuple[int, ...], Any] = {(*range(world.size),): None}
    for ranks in subgroups(broken.program):
        groups[ranks] = comm.new_group([*ranks])
    text = ""
    try:
        ProgramRank(broken.program, world.rank, groups).run()
    except (AssertionError, HiresError) as error:
        text = str(error)
    try:
        comm.shutdown()
    except HiresError as error:
        text = text or str(error)
    return text


def _meet(world: World) -> None:
    # The short limit is that of the operations, not of processes that start on a loaded machine.
    rendezvous.store(world, PATIENCE_S, "start")


def sums_with_a_dead_rank(world: World, backends: tuple[str, ...]) -> list[str]:
    """Returns why sums over each backend failed on rank 0, after rank 1 has ended."""
    _meet(world)
    comm.init(backends, world=world, timeout_s=BROKEN_TIMEOUT_S)
    for backend in backends:
        comm.all_reduce(torch.ones(1), backend=backend)
    texts: list[str] = []
    for backend in backends if world.rank == 0 else ():  # rank 1 ends without a word
        try:
            comm.all_reduce(torch.ones(1), backend=backend)
        except HiresError as error:
            texts.append(str(error))
    return texts


def subgroups(program: CommProgram) -> list[tuple[int, ...]]:
    """Returns the groups of a program in one order for all ranks."""
    world = (*range(len(program.ranks)),)
    used = {program.members(call) for calls in program.ranks for call in calls}
    return sorted(used - {world})


def mixed_over_mpi(world: World, port: int, *args: Any) -> int:
    """The same under mpirun, where gloo meets at a port of its own."""
    return mixed_of_rank(dataclasses.replace(world, port=port), *args)


def broken_over_mpi(world: World, port: int, *args: Any) -> str:
    """The same under mpirun."""
    return broken_of_rank(dataclasses.replace(world, port=port), *args)


def small_messages_of_rank(world: World, port: int) -> int:
    """Returns how many small messages left while their receiver waited in another library."""
    world = dataclasses.replace(world, port=port)
    comm.init(("gloo", "mpi"), world=world, timeout_s=BROKEN_TIMEOUT_S * 4)
    other, token = 1 - world.rank, torch.zeros(1)
    sizes = [0, 100, 256, 257, 1000, 1024, 5000, *[200] * 300]
    tensors = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    for batch in (tensors[:1], tensors[1:7], tensors[7:]):
        if world.rank == 0:
            buffers = [torch.zeros_like(tensor) for tensor in batch]
            handles = [comm.irecv(one, other, backend="mpi") for one in buffers]
            comm.recv(token, other, backend="gloo")
        else:
            handles = [comm.isend(one, other, backend="mpi") for one in batch]
        for handle in handles:
            handle.wait()
        if world.rank == 0:
            assert all(torch.equal(*pair) for pair in zip(buffers, batch, strict=True))
        else:
            comm.send(token, other, backend="gloo")
    comm.shutdown()
    return len(sizes)
