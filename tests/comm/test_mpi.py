"""A real MPI: every type, length and tag arrives, late ranks are named, wrong programs end in time.

One command of each library and size runs a list of jobs; what the operations compute is in
test_conformance.py, what needs no library in test_mpi_progress.py.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hires.comm.backends.mpi_backend import MpiBackend
from hires.comm.transport import Transport
from hires.core.ranks.mpi_library import GpuSupport
from tests.helpers import mixed_programs, mpi_jobs
from tests.helpers.mpi_ranks import run_mpi

BOTH = ("gloo", "mpi")


def jobs_of(size: int, folder: str) -> dict[str, mpi_jobs.Job]:
    """Returns the jobs of so many ranks by name; those that leave something open come last."""
    programs = (mixed_programs.run_programs, (BOTH, range(12), 2**20))
    if size == 3:
        return {
            "pieces": (mpi_jobs.deliveries, (1000,)),
            "programs": programs,
            "groups": (mpi_jobs.different_groups, ()),
            "refusals": (mpi_jobs.refusals, (folder,)),
        }
    return {
        "deliveries": (mpi_jobs.deliveries, (2**30,)),
        "progress": (mpi_jobs.progress, (folder,)),
        "windows": (mpi_jobs.windows, (folder,)),
        "sizes": (mpi_jobs.sizes_of_some_ranks, ()),
        "programs": programs,
        "small": (mpi_jobs.small_messages, ()),
        **{f"late {last}": (mpi_jobs.late_sum, (folder, last)) for last in range(2)},
        "rows": (mpi_jobs.rows_of_another_number, ()),
        # Open MPI 4.1 writes past the end of a receive that a message of over 4 KiB is longer than.
        **{f"{sent} for 2000": (mpi_jobs.other_sizes, (sent, 2000)) for sent in (40, 3000)},
        "calls": (mpi_jobs.different_calls, ()),
    }


@functools.cache
def answers(mpi: str, size: int) -> dict[str, list[Any]]:
    """Returns what each rank answers, by job."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = jobs_of(size, folder)
        found = run_mpi(mpi, mpi_jobs.run_jobs, size, [*jobs.values()], folder=Path(folder))
    by_job = zip([*jobs, "goes on"], zip(*found, strict=True), strict=True)
    return {name: [*ranks] for name, ranks in by_job}


@pytest.mark.mpi
def test_every_type_length_and_tag_arrives(mpi: str):
    for size, name in ((2, "deliveries"), (3, "pieces")):  # pieces: as of messages of gigabytes
        assert min(answers(mpi, size)[name]) >= 4 * 4 * 12
        assert answers(mpi, size)["goes on"] == [True] * size  # the program has started MPI


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 3])
def test_random_programs_over_gloo_and_mpi_at_once_are_right(mpi: str, size: int):
    assert answers(mpi, size)["programs"] == [12] * size


@pytest.mark.mpi
def test_messages_move_while_ranks_compute_or_wait_elsewhere(mpi: str):
    # Before there was a thread that polls, a message came with the sender's next call.
    assert answers(mpi, 2)["progress"] == [True, True]
    # What a rank owes for requests that are complete, as MPICH's last acknowledgements, moves only
    # in calls: the other rank waited for ever once this one made none.
    assert answers(mpi, 2)["windows"] == [39, 39]
    # Open MPI completes a send of more than 256 bytes when the receiver calls MPI, not before.
    assert answers(mpi, 2)["small"] == [307, 307]


@pytest.mark.mpi
@pytest.mark.parametrize("late", [0, 1])
def test_late_rank_of_a_large_sum_finds_it_open(mpi: str, late: int):
    found = answers(mpi, 2)[f"late {late}"]
    error, in_time, _, again = found[1 - late]
    assert "a sum took over 1 s" in error
    assert in_time
    assert found[late] == ["", True, [3.0], [3.0]]
    assert again == [3.0]


@pytest.mark.mpi
def test_sizes_of_two_sides_are_compared(mpi: str):
    found = answers(mpi, 2)
    assert found["sizes"] == [[True] * 4] * 2  # ranks with equal parts may leave sizes out
    # A call with counts left the third row as it was, without an error.
    error, other = found["rows"]
    assert "has 8 bytes, and its receive 12" in error
    assert not other
    # The library accepts one that is too short; and rank 0, which keeps the calls, leaves already.
    for sent in (40, 3000):
        (_, last), (first, _) = found[f"{sent} for 2000"]
        assert "and its receive 2000" in first or "longer than its rec" in first
        for text in (first, last):
            assert "calls send of" in text
            assert "calls recv of" in text


@pytest.mark.mpi
def test_late_ranks_are_named_and_what_mpi_cannot_carry_is_refused(mpi: str):
    received, sent, met, strided, complex_sum, tag = answers(mpi, 3)["refusals"][0]
    assert received.startswith(
        "a receive from rank 1 over mpi failed: the message of rank 1 with tag 5 took over 1 s"
    )
    assert sent.startswith(
        "a send to rank 1 over mpi failed: the answer of rank 1 to tag 6 took over 1 s"
    )
    assert met.startswith("a barrier among all ranks over mpi failed: a barrier took over 1 s")
    assert "not contiguous" in strided
    assert "no reduction" in complex_sum
    assert "tag -1 is beyond" in tag


# Both entered, and waited in Allreduce and Bcast for each other beyond any time limit.
@pytest.mark.mpi
def test_large_calls_that_differ_end_in_time(mpi: str):
    first, second = answers(mpi, 2)["calls"]
    # The others may end without one: a root has sent, and MPICH takes less than it has room for.
    assert any(error.startswith("operation: ") for error in first + second), (first, second)


# The MPI calls that make two communicators met at no rank, and have no time limit.
@pytest.mark.mpi
def test_ranks_that_make_different_groups_are_named_and_none_waits(mpi: str):
    for rank, (first, error, last) in enumerate(answers(mpi, 3)["groups"]):
        assert (first, last) == ("[0, 2]", "[0, 1, 2]")
        assert "make different groups at the same time, and this rank one of" in error
        assert f"this rank one of ranks {[1, 2] if rank == 1 else [0, 2]}; all ranks" in error
        assert re.search(r"ranks (1 and [02]|[02] and 1) make", error)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "first"), mixed_programs.BATCHES)
def test_a_thousand_random_programs(mpi: str, num_ranks: int, first: int, tmp_path: Path):
    job = BOTH, range(first, first + mixed_programs.BATCH), 2**22
    answers = run_mpi(mpi, mixed_programs.run_programs, num_ranks, *job, folder=tmp_path)
    assert answers == [mixed_programs.BATCH] * num_ranks


@pytest.mark.parametrize(
    ("support", "reached"),
    [
        (GpuSupport(False, False), []),
        (GpuSupport(True, False), ["isend", "all_to_all"]),
        (GpuSupport(True, True), ["isend", "all_to_all", "all_reduce", "broadcast"]),
    ],
)
def test_operations_whose_tensors_need_no_host(support: GpuSupport, reached: list[str]):
    backend = MpiBackend()
    backend._gpus = support
    staging = Transport({"mpi": backend}).staging
    methods = ["isend", "all_to_all", "all_reduce", "broadcast"]
    found = [one for one in methods if "cuda" in staging("mpi", one, torch.float32).reaches]
    assert found == reached
    # Sums of halves are ours, on the host; so are those that no operation is named for.
    assert "cuda" not in staging("mpi", "all_reduce", torch.bfloat16).reaches
    assert "cuda" not in staging("mpi").reaches
    assert "cpu" in staging("mpi", "isend", torch.float32).reaches
