"""What ranks do in tests of an MPI: one command starts them, and they run a list of jobs."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hires import comm
from hires.comm.backends import mpi_backend
from hires.comm.backends.backend_protocol import RESERVED_TAGS, TAGS
from hires.comm.transport import transport
from hires.core.errors import CommError
from hires.core.ranks import mpi_library
from hires.core.ranks.world import World
from tests.helpers.operations import TYPES, values
from tests.helpers.patience import until

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def run_jobs(world: World, jobs: list[Job]) -> list[Any]:
    """Returns what each of some jobs returns, and whether MPI goes on after the last."""
    mpi = mpi_library.load()  # the program starts MPI, and keeps it
    mpi.Init_thread(mpi.THREAD_SERIALIZED)
    answers = [function(world, *args) for function, args in jobs]
    return [*answers, not mpi.Is_finalized()]


def deliveries(world: World, piece_bytes: int) -> int:
    """Checks messages and gathers of all types, lengths and tags; returns how many messages."""
    whole_bytes, mpi_backend.PIECE_BYTES = mpi_backend.PIECE_BYTES, piece_bytes
    comm.init(["mpi"], world=world, timeout_s=60, shared_memory=False)
    library: Any = transport.backend
    group = library.new_group([*range(world.size)], datetime.timedelta(seconds=30))
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    # Receives in another order than sends, with the lowest, usual and highest tags; where the MPI
    # has fewer, two of them have one number there.
    tags = [0, 7, RESERVED_TAGS, 2**31 - 1, *{RESERVED_TAGS - (TAGS - library._num_tags)} - {0}]
    tags = [*dict.fromkeys(tags)]
    count = 0
    for dtype in TYPES:
        for size in (0, 1, 37, 40_000):
            buffers = {tag: torch.empty(size, dtype=dtype) for tag in tags}
            works = [library.irecv(buffers[tag], left, tag=tag) for tag in reversed(tags)]
            for i, tag in enumerate(tags):
                works.append(library.isend(values(dtype, (size,), world.rank, i), right, tag=tag))
            for work in works:
                work.wait()
            for i, tag in enumerate(tags):
                assert torch.equal(buffers[tag], values(dtype, (size,), left, i)), (dtype, tag)
            parts = [torch.empty(size, dtype=dtype) for _ in range(world.size)]
            beside = [*torch.empty(world.size, size, dtype=dtype).unbind(0)]
            for tensors in (parts, beside):
                library.all_gather(tensors, values(dtype, (size,), world.rank), group)
                for rank, part in enumerate(tensors):
                    assert torch.equal(part, values(dtype, (size,), rank))
            count += len(tags)
    comm.barrier()
    comm.shutdown()
    assert not library.is_initialized()
    mpi_backend.PIECE_BYTES = whole_bytes
    return count


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


def late_sum(world: World, folder: str, last: int) -> list[Any]:
    """A rank comes late to a large sum, which the other gives up; returns what each one gets."""
    comm.init(["mpi"], world=world, timeout_s=60, shared_memory=False)
    group = comm.new_group([0, 1], timeout=1.0)
    given_up, error, late = Path(folder) / f"given up {last}", "", world.rank == last
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


def refusals(world: World, folder: str) -> list[str]:
    """Returns the errors of rank 0: of what cannot be sent, and of a rank that never answers."""
    comm.init(["mpi"], world=world, timeout_s=1.0, shared_memory=False)
    done, errors = Path(folder) / "refused", []
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


def small_messages(world: World) -> int:
    """Returns how many small messages left while their receiver waited in another library."""
    comm.init(("gloo", "mpi"), world=world, timeout_s=12.0)
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
