"""Messages and sums through a real MPI: every type and length, in groups, late, and refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import mpi_disagreements, mpi_jobs
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.mpi


# Whole, and cut into many pieces, as messages of gigabytes are.
@pytest.mark.parametrize("piece_bytes", [2**30, 1000])
def test_every_type_length_and_tag_arrives(mpi: str, piece_bytes: int, tmp_path: Path):
    counts = run_mpi(mpi, mpi_jobs.deliveries, 3, piece_bytes, folder=tmp_path)
    assert counts == [280] * 3


def test_reductions_of_two_ranks_are_the_bits_of_gloo(mpi: str, tmp_path: Path):
    sizes = [1, 37, 5000]
    found = run_mpi(mpi, mpi_jobs.sums, 2, "mpi", sizes, folder=tmp_path)
    expected = run_ranks(mpi_jobs.sums, 2, "gloo", sizes)
    assert expected[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert {name: ours[name] for name in theirs} == theirs
        assert ours["SUM torch.bool 37"] == ours["MAX torch.bool 37"]  # or: a sum of truth values


def test_reductions_of_three_ranks_are_the_same_bits_on_all(mpi: str, tmp_path: Path):
    first, *others = run_mpi(mpi, mpi_jobs.sums, 3, "mpi", [37, 300_000], folder=tmp_path)
    assert "pair torch.bfloat16 37" not in first  # of the last two ranks only
    for other in others:
        assert {name: other[name] for name in first} == first
        # A pair of halves is added as torch does it, and rounded once.
        terms = [mpi_jobs.values(mpi_jobs.torch.bfloat16, 37, rank) for rank in (1, 2)]
        assert other["pair torch.bfloat16 37"] == sum(terms).double().tolist()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_programs_give_what_they_should(mpi: str, seed: int, tmp_path: Path):
    assert run_mpi(mpi, mpi_jobs.programs, 3, seed, 150, folder=tmp_path) == [0, 0, 0]


def test_large_message_moves_while_its_sender_computes(mpi: str, tmp_path: Path):
    # Before there was a thread that polls it came with the sender's next call.
    assert run_mpi(mpi, mpi_jobs.progress, 2, str(tmp_path), folder=tmp_path) == [True, True]


# What a rank owes for requests that are complete, as MPICH's last acknowledgements, moves only in
# calls: the other rank waited for ever once this one made none.
def test_rank_whose_messages_are_complete_still_serves_the_others(mpi: str, tmp_path: Path):
    assert run_mpi(mpi, mpi_jobs.windows, 2, str(tmp_path), folder=tmp_path) == [39, 39]


def test_late_ranks_are_named_and_what_mpi_cannot_carry_is_refused(mpi: str, tmp_path: Path):
    errors, _ = run_mpi(mpi, mpi_disagreements.refusals, 2, str(tmp_path), folder=tmp_path)
    received, sent, met, strided, complex_sum, tag = errors
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


# MPI forbids to send from the memory that it receives into: MPICH gave other numbers.
def test_one_tensor_is_both_sides_and_a_program_keeps_the_mpi_it_started(mpi: str, tmp_path: Path):
    first, second = run_mpi(mpi, mpi_jobs.shared_with_program, 2, folder=tmp_path)
    for rank, (gathered, scattered, swapped, _, is_finalized) in enumerate((first, second)):
        assert gathered == [1.0, 1.0, 2.0, 2.0]
        assert scattered == [4.0 * rank + 1, 4.0 * rank + 3]
        assert swapped == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]][rank]
        assert not is_finalized
    assert "took over 0.5 s" in first[3]  # that of the group, not 60 s


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_wait_and_ranks_that_do_not_share_large_collectives(
    mpi: str, num_ranks: int, tmp_path: Path
):
    wrong = run_mpi(mpi, mpi_jobs.meetings, num_ranks, num_ranks, 60, folder=tmp_path)
    assert wrong == [0] * num_ranks


# A rank that had said that it would come, and had left, kept the late one in MPI for ever.
@pytest.mark.parametrize("late", [0, 1])
def test_late_rank_of_a_large_sum_finds_it_open(mpi: str, late: int, tmp_path: Path):
    folder = tmp_path / f"late{late}"
    folder.mkdir()
    found = run_mpi(mpi, mpi_jobs.late_meeting, 2, str(folder), folder=tmp_path)
    error, in_time, _, again = found[1 - late]
    assert "a sum took over 1 s" in error
    assert in_time
    assert found[late] == ["", True, [3.0], [3.0]]
    assert again == [3.0]


# One rank began Alltoall, and the other sent messages.
def test_ranks_with_equal_parts_may_leave_sizes_out(mpi: str, tmp_path: Path):
    assert run_mpi(mpi, mpi_jobs.sizes_of_some_ranks, 2, folder=tmp_path) == [[True] * 4] * 2


# A call with counts left the third row as it was, without an error.
def test_rows_that_are_missing_are_an_error(mpi: str, tmp_path: Path):
    error, other = run_mpi(mpi, mpi_disagreements.rows_of_another_number, 2, folder=tmp_path)
    assert "has 8 bytes, and its receive 12" in error
    assert not other


# Both entered, and waited in Allreduce and Bcast for each other beyond any time limit.
def test_large_calls_that_differ_end_in_time(mpi: str, tmp_path: Path):
    first, second = run_mpi(mpi, mpi_disagreements.different_calls, 2, folder=tmp_path)
    # The others may end without one: a root has sent, and MPICH takes less than it has room for.
    assert any(error.startswith("operation: ") for error in first + second), (first, second)


# The library accepts one that is too short; and rank 0, which keeps the calls, is leaving already.
def test_message_of_another_size_is_named_with_both_calls(mpi: str, tmp_path: Path):
    for sent, taken in ((40, 4000), (8000, 4000)):
        ends = run_mpi(mpi, mpi_disagreements.other_sizes, 2, sent, taken, folder=tmp_path)
        assert f"and its receive {taken}" in ends[1][0] or "longer than its rec" in ends[1][0]
        for text in (ends[1][0], ends[0][1]):
            assert "calls send of" in text
            assert "calls recv of" in text


# The MPI calls that make two communicators met at no rank, and have no time limit.
def test_ranks_that_make_different_groups_are_named_and_none_waits(mpi: str, tmp_path: Path):
    found = run_mpi(mpi, mpi_disagreements.different_groups, 3, folder=tmp_path)
    for rank, (first, error, last) in enumerate(found):
        assert (first, last) == ("[0, 2]", "[0, 1, 2]")
        assert "make different groups at the same time, and this rank one of" in error
        assert f"this rank one of ranks {[1, 2] if rank == 1 else [0, 2]}; all ranks" in error
        assert re.search(r"ranks (1 and [02]|[02] and 1) make", error)
