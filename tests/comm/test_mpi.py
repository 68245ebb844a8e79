"""A real MPI: every type, length and tag arrives, late ranks are named, wrong programs end in time.

One command of each library and size runs a list of jobs; what the operations compute is in
test_conformance.py, what needs no library in test_mpi_progress.py.
"""

from __future__ import annotations

import datetime
import functools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hires import comm
from hires.comm.backends import mpi_backend
from hires.comm.backends.backend import RESERVED_TAGS, TAGS
from hires.core.ranks import mpi_library
from hires.core.ranks.world import World
from tests.helpers import mixed_programs
from tests.helpers.conformance import assert_late_and_left, late_for_a_group
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.operations import TYPES, values
from tests.helpers.patience import until
from tests.helpers.ranks import error_of

BOTH = ("gloo", "mpi")
Job = tuple[Callable[..., Any], tuple[Any, ...]]


def run_jobs(world: World, jobs: list[Job]) -> list[Any]:
    """Returns the answer of each job, and whether MPI still runs after the last one."""
    mpi = mpi_library.load()  # the program starts MPI, and keeps it
    mpi.Init_thread(mpi.THREAD_SERIALIZED)
    answers = [function(world, *args) for function, args in jobs]
    return [*answers, not mpi.Is_finalized()]


def begin(world: World, timeout_s: float = 60.0) -> None:
    comm.init(["mpi"], world=world, timeout_s=timeout_s)


@functools.cache
def answers(mpi: str, size: int) -> dict[str, list[Any]]:
    """Returns what each rank answers, by job; those that leave something open come last."""
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, Job] = {
            "deliveries": (deliveries, (2**30 if size == 2 else 1000,)),  # as of gigabytes
            "programs": (mixed_programs.run_programs, (BOTH, range(12), 2**20)),
        }
        if size == 3:
            jobs |= {"groups": (different_groups, ())}
        else:
            jobs |= {"progress": (progress, (folder,)), "windows": (windows, (folder,))}
            jobs |= {"small": (small_messages, ()), "late": (late_sum, (folder,))}
            given_up = str(Path(folder) / "no group")
            jobs |= {"late group": (late_for_a_group, ("mpi", given_up))}
            jobs |= {"sizes": (other_sizes, ()), "calls": (different_calls, ())}
        found = run_mpi(mpi, run_jobs, size, [*jobs.values()], folder=Path(folder))
    by_job = zip([*jobs, "goes on"], zip(*found, strict=True), strict=True)
    return {name: [*ranks] for name, ranks in by_job}


def deliveries(world: World, piece_bytes: int) -> int:
    """Checks messages and gathers of all types, lengths and tags; returns how many messages."""
    whole_bytes, mpi_backend.PIECE_BYTES = mpi_backend.PIECE_BYTES, piece_bytes
    begin(world)
    library: Any = comm.default_world().backend
    group = library.new_group([*range(world.size)], datetime.timedelta(seconds=30))
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    # Receives in another order than sends, with the lowest, usual and highest tags; where the MPI
    # has fewer, two of them have one number there.
    tags = [0, 7, RESERVED_TAGS, 2**31 - 1, *{RESERVED_TAGS - (TAGS - library._num_tags)} - {0}]
    tags, count = [*dict.fromkeys(tags)], 0
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
            for tensors in (parts, [*torch.empty(world.size, size, dtype=dtype).unbind(0)]):
                library.all_gather(tensors, values(dtype, (size,), world.rank), group)
                for rank, part in enumerate(tensors):
                    assert torch.equal(part, values(dtype, (size,), rank))
            count += len(tags)
    comm.barrier()
    comm.shutdown()
    assert not library.is_initialized()
    mpi_backend.PIECE_BYTES = whole_bytes
    return count


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 3])
def test_every_type_length_and_tag_arrives(mpi: str, size: int):
    assert min(answers(mpi, size)["deliveries"]) >= 4 * 4 * 12
    assert answers(mpi, size)["goes on"] == [True] * size  # the program has started MPI


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 3])
def test_random_programs_over_gloo_and_mpi_at_once_are_right(mpi: str, size: int):
    assert answers(mpi, size)["programs"] == [12] * size


def progress(world: World, folder: str) -> bool:
    """Rank 0 sends much and calls nothing until rank 1 has it; returns whether it came."""
    begin(world)
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
    other, buffers = 1 - world.rank, [torch.zeros(65536) for _ in range(64)]
    for turn in range(40):
        numbers = torch.full((65536,), float(turn))
        works = [comm.irecv(one, other, tag=turn) for one in buffers]
        works += [comm.isend(numbers, other, tag=turn) for _ in buffers]
        for work in works:
            work.wait()
        assert all(bool((one == turn).all()) for one in buffers)
        Path(folder, f"{world.rank}-{turn}").touch()
        until(Path(folder, f"{other}-{turn}").exists)
    comm.shutdown()
    return turn


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


@pytest.mark.mpi
def test_messages_move_while_ranks_compute_or_wait_elsewhere(mpi: str):
    # Before there was a thread that polls, a message came with the sender's next call.
    assert answers(mpi, 2)["progress"] == [True, True]
    # What a rank owes for requests that are complete, as MPICH's last acknowledgements, moves only
    # in calls: the other rank waited for ever once this one made none.
    assert answers(mpi, 2)["windows"] == [39, 39]
    # Open MPI completes a send of more than 256 bytes when the receiver calls MPI, not before.
    assert answers(mpi, 2)["small"] == [307, 307]


def late_sum(world: World, folder: str) -> list[Any]:
    """A rank comes late to a large sum, which the other gives up; returns what each one gets."""
    begin(world)
    group = comm.new_group([0, 1], timeout=1.0)
    given_up, late = Path(folder) / "given up", world.rank == 1
    tensor, again = (torch.full((600_000,), world.rank + 1.0) for _ in range(2))
    if late:
        until(given_up.exists)
    error = error_of(lambda: comm.all_reduce(tensor, group=group))
    given_up.touch()
    comm.barrier()
    comm.all_reduce(again, group=group)
    comm.shutdown()
    return [error, tensor.unique().tolist(), again.unique().tolist()]


@pytest.mark.mpi
def test_late_rank_of_a_large_sum_finds_it_open(mpi: str):
    (error, _, again), late = answers(mpi, 2)["late"]
    assert "a sum took over 1 s" in error
    assert late == ["", [3.0], [3.0]]
    assert again == [3.0]


def other_sizes(world: World) -> list[tuple[str, str]]:
    """Returns what receives of other sizes say, and the ends of the worlds; rank 0 ends first."""
    errors = []
    # Open MPI 4.1 writes past the end of a receive that a message of over 4 KiB is longer than.
    for sent in (40, 3000):
        comm.init(["mpi"], world=world, timeout_s=20)
        first, buffer = "", torch.zeros(2000, dtype=torch.uint8)
        for size in (sent, 2000):  # the first of a size is compared before it begins
            move, other = ((comm.send, 1), (comm.recv, 0))[world.rank]
            move(torch.zeros(size, dtype=torch.uint8), other)
        if world.rank == 0:
            comm.send(torch.ones(sent, dtype=torch.uint8), 1)
        else:
            time.sleep(0.2)
            first = error_of(lambda buffer=buffer: comm.recv(buffer, 0))
        errors.append((first, error_of(comm.shutdown)))
    return errors


@pytest.mark.mpi
def test_sizes_of_two_sides_are_compared(mpi: str):
    # The library accepts one that is too short; and rank 0, which keeps the calls, leaves already.
    for (_, last), (first, _) in zip(*answers(mpi, 2)["sizes"], strict=True):
        assert "and its receive 2000" in first or "longer than its rec" in first
        for text in (first, last):
            assert "calls send of" in text
            assert "calls recv of" in text


def different_calls(world: World) -> list[str]:
    """Returns what faulty programs raise: large calls of different operation, root and size."""
    begin(world)
    large, rank = 2**18, world.rank
    programs: dict[str, Callable[[torch.Tensor, Any], Any]] = {
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
    for (name, program), group in zip(programs.items(), groups, strict=True):
        if error := error_of(functools.partial(program, torch.ones(large), group)):
            raised.append(f"{name}: {error}")
        comm.barrier()  # no thread of a rank is inside the library, with its lock
    return raised


# Both entered, and waited in Allreduce and Bcast for each other beyond any time limit.
@pytest.mark.mpi
def test_large_calls_that_differ_end_in_time(mpi: str):
    first, second = answers(mpi, 2)["calls"]
    # The others may end without one: a root has sent, and MPICH takes less than it has room for.
    assert any(error.startswith("operation: ") for error in first + second), (first, second)


def different_groups(world: World) -> list[str]:
    """Returns how the making of groups ends: alike, of other ranks on rank 1, and alike again."""
    limit_s = 5.0
    begin(world, limit_s)
    answers = []
    for number, ranks in enumerate(([0, 2], [1, 2] if world.rank == 1 else [0, 2], [0, 1, 2])):
        if number == 2 and world.rank != 1:  # rank 1 comes once its time for rank 2 is over
            time.sleep(limit_s / 2)
        answers.append(error_of(lambda ranks=ranks: comm.new_group(ranks)))
    comm.shutdown()
    return answers


# The MPI calls that make two communicators met at no rank, and have no time limit.
@pytest.mark.mpi
def test_rank_that_makes_another_group_ends_in_time_and_names_who_did_not_come(mpi: str):
    (first, second, _), other, last = answers(mpi, 3)["groups"]
    assert first == second == other[0] == other[2] == ""
    assert "group [1, 2] over mpi failed: rank 2 has not come in time" in other[1]
    assert last == ["", "", ""]
    assert_late_and_left(answers(mpi, 2)["late group"])


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "first"), mixed_programs.BATCHES)
def test_a_thousand_random_programs(mpi: str, num_ranks: int, first: int, tmp_path: Path):
    job = BOTH, range(first, first + mixed_programs.BATCH), 2**22
    answers = run_mpi(mpi, mixed_programs.run_programs, num_ranks, *job, folder=tmp_path)
    assert answers == [mixed_programs.BATCH] * num_ranks
