"""What ranks do in tests of backends: functions that ``run_mpi`` and ``run_ranks`` can name."""

from __future__ import annotations

import datetime
import random
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires import comm
from hires.comm.backends import mpi_backend
from hires.comm.backends.backend_protocol import RESERVED_TAGS
from hires.comm.transport import transport
from hires.core.errors import CommError
from hires.core.ranks import mpi_library
from hires.core.ranks.world import World
from tests.helpers.patience import until

TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def values(dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """Returns numbers that any type holds, and of which a few may be added."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dtype.is_floating_point:
        return numbers.to(dtype)
    return numbers.abs().mul(3).to(torch.int64).clamp(max=9).to(dtype)


def sums(world: World, backend: str, sizes: list[int]) -> dict[str, list]:
    """Returns the sums and largest values by type and size, also in a group of the last two."""
    comm.init([backend], world=world, timeout_s=60, shared_memory=False)
    library = transport.backend
    last = [world.size - 2, world.size - 1]
    group = library.new_group(last)
    found = {}
    for dtype in TYPES:
        for size in sizes:
            if not size or (backend == "gloo" and dtype in (torch.bool, torch.int16)):
                continue  # gloo's sums lack these types
            for name in ("SUM", "MAX"):
                tensor = values(dtype, size, world.rank)
                library.all_reduce(tensor, getattr(dist.ReduceOp, name))
                found[f"{name} {dtype} {size}"] = tensor.double().tolist()
            if world.rank in last:
                tensor = values(dtype, size, world.rank)
                work = library.all_reduce(tensor, group=group, async_op=True)
                work.wait()
                assert work.is_completed()
                found[f"pair {dtype} {size}"] = tensor.double().tolist()
    comm.shutdown()
    return found


def deliveries(world: World, piece_bytes: int) -> int:
    """Checks messages, gathers and broadcasts of all types and lengths; returns how many."""
    mpi_backend.PIECE_BYTES = piece_bytes
    comm.init(["mpi"], world=world, timeout_s=60, shared_memory=False)
    library = transport.backend
    group = library.new_group([*range(world.size)], datetime.timedelta(seconds=30))
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    count = 0
    for dtype in TYPES:
        for size in (0, 1, 37, 40_000):
            # Receives in another order than sends, with the lowest, usual and highest tags.
            tags = [0, 7, RESERVED_TAGS, 2**31 - 1]
            buffers = {tag: torch.empty(size, dtype=dtype) for tag in tags}
            works = [library.irecv(buffers[tag], left, tag=tag) for tag in reversed(tags)]
            for i, tag in enumerate(tags):
                sent = values(dtype, size, 10 * world.rank + i)
                works.append(library.isend(sent, right, tag=tag))
            for work in works:
                work.wait()
            for i, tag in enumerate(tags):
                assert torch.equal(buffers[tag], values(dtype, size, 10 * left + i)), (dtype, tag)
            parts = [torch.empty(size, dtype=dtype) for _ in range(world.size)]
            beside = [*torch.empty(world.size, size, dtype=dtype).unbind(0)]
            for tensors in (parts, beside):
                library.all_gather(tensors, values(dtype, size, world.rank), group)
                for rank, part in enumerate(tensors):
                    assert torch.equal(part, values(dtype, size, rank))
            given = values(dtype, size, world.rank)
            library.broadcast(given, world.size - 1, group)
            assert torch.equal(given, values(dtype, size, world.size - 1))
            count += len(tags) + 3
    # A channels-last tensor is summed as one that is contiguous.
    tensor = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    expected = tensor * world.size
    comm.all_reduce(tensor)
    assert torch.equal(tensor, expected)
    comm.barrier()
    comm.shutdown()
    assert not library.is_initialized()
    return count


def programs(world: World, seed: int, length: int) -> int:
    """Runs a random program that all ranks know; returns how many results were wrong."""
    comm.init(["mpi"], world=world, timeout_s=60, shared_memory=False)
    groups = [[*range(world.size)], [0, 1], [1, world.size - 1] if world.size > 2 else [0, 1]]
    made = comm.make_groups(groups)
    chance, wrong, waiting = random.Random(seed), 0, []
    for number in range(length):
        kind = chance.choice(("message", "sum", "late sum", "gather", "wait", "largest"))
        size, dtype = chance.choice((0, 1, 5, 300, 70_000, 600_000)), chance.choice(TYPES[:2])
        source, target = chance.sample(range(world.size), 2)
        where = chance.randrange(len(groups))
        tag = chance.randrange(3)
        expected = values(dtype, size, number)
        if kind == "message":
            if world.rank == source:
                waiting.append((comm.isend(expected, target, tag=tag), expected, expected))
            elif world.rank == target:
                buffer = torch.empty(size, dtype=dtype)
                waiting.append((comm.irecv(buffer, source, tag=tag), buffer, expected))
        elif kind in ("sum", "late sum") and where in made:
            terms = [values(dtype, size, number + rank) for rank in groups[where]]
            mine = values(dtype, size, number + world.rank)
            late = kind == "late sum"
            handle = comm.all_reduce(mine, group=made[where], async_op=late)
            waiting.append((handle or comm.Handle(None, None), mine, sum(terms)))
        elif kind == "gather" and where in made:
            got = comm.all_gather_stacked(values(dtype, size, world.rank), made[where])
            parts = [values(dtype, size, rank) for rank in groups[where]]
            wrong += not torch.equal(got, torch.stack(parts))
        elif kind == "largest":
            wrong += comm.max_all(number * world.rank) != number * (world.size - 1)
        elif kind == "wait":
            random.Random(number + world.rank).shuffle(waiting)  # an order of its own
            wrong += _finish(waiting)
    wrong += _finish(waiting)
    comm.barrier()
    comm.shutdown()
    return wrong


def _finish(waiting: list[tuple[Any, Tensor, Tensor]]) -> int:
    wrong = 0
    for handle, got, expected in waiting:
        handle.wait()
        wrong += not torch.allclose(got, expected, rtol=1e-6, atol=1e-6)
    waiting.clear()
    return wrong


def progress(world: World, folder: str) -> bool:
    """Rank 0 sends much and calls nothing until rank 1 has it; returns whether it came."""
    comm.init(["mpi"], world=world, timeout_s=60, shared_memory=False)
    arrived = Path(folder) / "arrived"
    if world.rank == 0:
        sent = comm.isend(torch.ones(4_000_000), 1, tag=3)
        until(arrived.exists)
        sent.wait()
    else:
        buffer = torch.zeros(4_000_000)
        comm.irecv(buffer, 0, tag=3).wait()
        assert bool((buffer == 1).all())
        arrived.touch()
    comm.barrier()
    threads = [thread.name for thread in threading.enumerate()]
    comm.shutdown()
    return "mpi-progress" in threads


def latency(world: World, backend: str, rounds: int) -> dict[str, float]:
    """Returns the median time in microseconds of 16 bytes, by ours and by raw calls."""
    comm.init([backend], world=world, timeout_s=60, shared_memory=False)
    library = transport.backend
    [group] = comm.make_groups([[*range(world.size)]]).values()
    tensor, buffer = torch.zeros(2).double(), torch.zeros(2).double()
    other = 1 - world.rank

    def ping(isend: Any, irecv: Any) -> None:
        for turn in (0, 1):
            if world.rank == turn:
                isend(tensor, other, tag=1).wait()
            else:
                irecv(buffer, other, tag=1).wait()

    ways = {
        "round trip, comm": lambda: ping(comm.isend, comm.irecv),
        "round trip, backend": lambda: ping(library.isend, library.irecv),
        "all-reduce, comm": lambda: comm.all_reduce(tensor, group=group),
        "all-reduce, backend": lambda: library.all_reduce(tensor),
    }
    if backend == "mpi":
        from mpi4py import MPI

        world_comm, a, b = MPI.COMM_WORLD, bytearray(16), bytearray(16)

        def raw() -> None:
            with library.calls:
                if world.rank == 0:
                    world_comm.Send(a, 1, 5), world_comm.Recv(b, 1, 5)
                else:
                    world_comm.Recv(b, 0, 5), world_comm.Send(a, 0, 5)

        def raw_sum() -> None:
            with library.calls:
                world_comm.Allreduce(one, two)

        ways["round trip, mpi4py"] = raw
        one, two = [a, 2, MPI.DOUBLE], [b, 2, MPI.DOUBLE]
        ways["all-reduce, mpi4py"] = raw_sum
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if number >= rounds // 10:
                times[name].append(time.perf_counter() - begin)
    comm.barrier()
    comm.shutdown()
    return {name: round(1e6 * sorted(all_s)[len(all_s) // 2], 2) for name, all_s in times.items()}


def windows(world: World, folder: str) -> int:
    """Both ranks send and receive many large messages, and then wait outside MPI for each other."""
    comm.init(["mpi"], world=world, timeout_s=30)
    other, taken = 1 - world.rank, [torch.zeros(65536) for _ in range(64)]
    for turn in range(40):
        given = torch.full((65536,), float(turn))
        works = [comm.irecv(one, other, tag=turn) for one in taken]
        works += [comm.isend(given, other, tag=turn) for _ in taken]
        for work in works:
            work.wait()
        assert all(bool((one == turn).all()) for one in taken)
        Path(folder, f"{world.rank}-{turn}").touch()
        until(Path(folder, f"{other}-{turn}").exists)
    comm.shutdown()
    return turn


def shared_with_program(world: World) -> list[Any]:
    """Returns what operations within one tensor give, the error of a late one, and MPI's state.

    The program has started MPI, and goes on with it.
    """
    mpi = mpi_library.load()
    mpi.Init_thread(mpi.THREAD_SERIALIZED)
    comm.init(["mpi"], world=world, timeout_s=60)
    rank, own = world.rank, slice(2 * world.rank, 2 * world.rank + 2)
    gathered, scattered = torch.zeros(4), torch.arange(4.0) + rank
    gathered[own] = rank + 1.0
    swapped = torch.arange(4.0) + 10 * rank
    comm.all_gather_into_tensor(gathered, gathered[own])
    comm.reduce_scatter_tensor(scattered[own], scattered)
    comm.all_to_all_single(swapped, swapped)
    found: list[Any] = [one.tolist() for one in (gathered, scattered[own], swapped)]
    group, error = comm.new_group([0, 1], timeout=0.5), ""
    if rank == 0:
        try:
            comm.recv(torch.zeros(1), 1, group, tag=5)
        except CommError as late:
            error = str(late)
    comm.barrier()
    if rank == 1:
        comm.send(torch.zeros(1), 0, group, tag=5)
    comm.barrier()
    comm.shutdown()
    mpi.COMM_WORLD.Barrier()
    state = mpi.Is_finalized()
    mpi.Finalize()
    return [*found, error, state]


def meetings(world: World, seed: int, length: int) -> int:
    """Runs large collectives that each rank waits for or not, as it likes; returns how many erred.

    Numbers are whole, so that sums are exact in any order.
    """
    comm.init(["mpi"], world=world, timeout_s=60, shared_memory=False)
    transport.backends["mpi"]._may_block = True  # also where cores are few
    mpi_backend.MEETING_BYTES = 10_000
    groups = [comm.new_group([*range(world.size)]), comm.new_group([0, world.size - 1])]
    shared, own, wrong = random.Random(seed), random.Random(seed + world.rank), 0
    open_works: list[tuple[Any, Tensor, Tensor]] = []
    for number in range(length):
        kind = shared.choice(("all_reduce", "reduce", "broadcast", "gather", "scatter", "swap"))
        group, size = shared.choice(groups), shared.choice((2_000, 60_000, 600_000))
        root, dtype = shared.choice(group.ranks), shared.choice((torch.float32, torch.bfloat16))
        if group.index < 0:
            continue
        n, late = group.size, own.random() < 0.3
        terms = [
            torch.arange(n * size).add(rank + number).remainder(7).to(dtype) for rank in range(n)
        ]
        mine, total = terms[group.index].clone(), sum(terms)
        part = slice(group.index * size, (group.index + 1) * size)
        taken = torch.empty(size, dtype=dtype)
        if kind == "all_reduce":
            work, got, expected = comm.all_reduce(mine, group=group, async_op=late), mine, total
        elif kind == "reduce":
            work = comm.reduce(mine, root, group=group, async_op=late)
            expected, got = total if world.rank == root else terms[group.index], mine
        elif kind == "broadcast":
            work = comm.broadcast(mine, root, group, late)
            got, expected = mine, terms[group.ranks.index(root)]
        elif kind == "gather":
            got, expected = torch.empty(n * n * size, dtype=dtype), torch.cat(terms)
            work = comm.all_gather_into_tensor(got, mine, group, late)
        elif kind == "scatter":
            work, got = comm.reduce_scatter_tensor(taken, mine, group=group, async_op=late), taken
            expected = total[part]
        else:
            got = torch.empty_like(mine)
            work = comm.all_to_all_single(got, mine, group=group, async_op=late)
            expected = torch.cat([term[part] for term in terms])
        if work is None:
            wrong += not torch.equal(got, expected)
        else:
            open_works.append((work, got, expected))
        if own.random() < 0.3:
            wrong += _finish(open_works)
    wrong += _finish(open_works)
    comm.barrier()
    comm.shutdown()
    return wrong


def late_meeting(world: World, folder: str) -> list[Any]:
    """Rank 1 comes late to a large sum, which the other gives up; returns what each one gets."""
    comm.init(["mpi"], world=world, timeout_s=60, shared_memory=False)
    transport.backends["mpi"]._may_block = True
    group = comm.new_group([0, 1], timeout=1.0)
    given_up, error, late = Path(folder) / "given up", "", world.rank == int(Path(folder).name[-1])
    tensor = torch.full((600_000,), world.rank + 1.0)
    if late:
        until(given_up.exists)
    begin_s = time.monotonic()
    try:
        comm.all_reduce(tensor, group=group)
    except CommError as failed:
        error = str(failed)
    waited_s = time.monotonic() - begin_s
    if not late:
        given_up.touch()
    again = torch.full((600_000,), world.rank + 1.0)
    comm.barrier()
    comm.all_reduce(again, group=group)
    comm.shutdown()
    return [error, waited_s < 5, tensor.unique().tolist(), again.unique().tolist()]


def sizes_of_some_ranks(world: World) -> list[bool]:
    """Returns whether exchanges are right in which only rank 1 has parts that differ."""
    comm.init(["mpi"], world=world, timeout_s=20, shared_memory=False)
    transport.backends["mpi"]._may_block = True
    right, group = [], comm.new_group([0, 1])
    for rows in (1, 2**15):  # of 4 numbers: also where rank 0 would meet the others
        given, sizes = torch.full((4 * rows, 4), world.rank + 1.0), None
        if world.rank == 1:
            given, sizes = torch.full((5 * rows, 4), 2.0), [2 * rows, 3 * rows]
        taken = torch.zeros_like(given)
        comm.all_to_all_single(taken, given, sizes, sizes, group)
        expected = torch.ones_like(given)
        expected[2 * rows :] = 2.0
        right.append(torch.equal(taken, expected))
        whole = torch.full((4 * rows, 4), world.rank + 1.0)
        comm.all_to_all_single(swapped := torch.zeros_like(whole), whole, group=group)
        right.append(
            torch.equal(
                swapped,
                torch.repeat_interleave(torch.tensor([1.0, 2.0]), 2 * rows)[:, None].expand(-1, 4),
            )
        )
    comm.shutdown()  # the check finds no difference
    return right
