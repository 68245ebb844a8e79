"""Functions of hires.comm between real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hires.comm.backends import attach, shared
from hires.comm.backends.attach import _pieces
from hires.core.errors import CommError
from hires.core.ranks.mailbox_limits import MAIL_BYTES, SLOTS
from tests.helpers.comm_jobs import (
    absent_from_patience,
    agreement_of_rank,
    gather_of_rank,
    labels_of_rank,
    late_gather,
    many_gathers,
    no_room,
    silent_peer,
    sums_of_rank,
    uneven_gather,
)
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("num_elements", [1, 100_000])  # small, and gloo's own collective
@pytest.mark.parametrize("memory", [True, False])  # small ones through memory, or point to point
def test_gather_stacks_in_rank_order_and_reduce_sums(num_elements: int, memory: bool):
    for answer in run_ranks(gather_of_rank, 3, num_elements, memory):
        assert answer == [0.0, 1.0, 2.0, 3.0]


def test_ranks_agree_on_the_largest_number_and_hear_the_first_ones_words():
    for answer in run_ranks(agreement_of_rank, 3):
        assert answer == (2, 7, ["r\u00e4nk 0 of 3", ""])


@pytest.mark.parametrize("way", ["memory", "forbidden", "sent"])
def test_sums_are_the_same_bits_on_all_ranks_whatever_way_they_take(way: str):
    sizes = [5, 200_001, 270_000, 1, 70_000]
    answers = run_ranks(sums_of_rank, 3, sizes, way)
    assert [reads for reads, _, _ in answers] == [way == "memory"] * 3
    assert way != "memory" or attach.is_allowed()  # what a plan of this machine counts on
    # Without memory, a tensor of 1 MiB or more is summed in place and the others as one of a type.
    sent = [] if way == "memory" else [270_000, 270_007, 15]
    assert [messages for _, _, messages in answers] == [sent] * 3
    sums = [found for _, found, _ in answers]
    assert sums[0] == sums[1] == sums[2]
    own = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for size, found in zip(sizes, sums[0], strict=False):
        expected = sum(torch.randn(size, generator=g).double() for g in own)
        assert torch.allclose(torch.tensor(found).double(), expected, atol=1e-5)
    assert sums[0][-1] == [4.5] * 15


@given(st.lists(st.integers(0, 40), min_size=1), st.integers(1, 5), st.integers(1, 9))
def test_shares_of_a_sum_cover_every_number_once(sizes: list[int], num_ranks: int, most: int):
    seen = [[0] * size for size in sizes]
    for rank in range(num_ranks):
        for tensor, first, end in _pieces(sizes, num_ranks, rank, most):
            assert 0 < end - first <= most
            for index in range(first, end):
                seen[tensor][index] += 1
    assert all(count == 1 for tensor in seen for count in tensor)


@pytest.mark.slow
def test_silent_peer_is_named_within_the_timeout():
    told, _ = run_ranks(silent_peer, 2)
    assert "a receive from rank 1" in told


def test_patience_with_slow_disks_does_not_wait_an_hour_for_a_rank_that_does_not_come(tmp_path):
    error, _ = run_ranks(absent_from_patience, 2, str(tmp_path / "over"), timeout_s=60)
    assert "rank 1" in error


def test_shared_memory_gathers_keep_their_order_when_ranks_are_late():
    before = set(Path("/dev/shm").iterdir())
    assert run_ranks(many_gathers, 3, 400) == [0, 0, 0]
    assert not [p for p in set(Path("/dev/shm").iterdir()) - before if p.name.startswith("hires-")]


def test_rank_that_misses_a_gather_is_named_within_the_timeout(tmp_path: Path):
    told, _ = run_ranks(late_gather, 2, tmp_path / "done")
    assert "[1]" in told


def test_full_shared_memory_is_named_by_all_members():
    """It was used up to the last byte, and then the ranks went without, and said nothing."""
    first, second = run_ranks(no_room, 2)
    assert first == second
    assert "the exchange of ranks 0 to 1 needs" in first
    assert "KiB free" in first
    assert first.endswith("comm.shared_memory=false, and a backend other than shm and cma")


def test_mailboxes_have_the_places_that_the_proof_counts_on():
    memory = memoryview(bytearray(shared.num_bytes(2, MAIL_BYTES)))
    here, there = (shared.SharedMemory(memory, [3, 7], index, 0.05, MAIL_BYTES) for index in (0, 1))
    for number in range(SLOTS):
        here.send(torch.tensor([number]), 1)
    with pytest.raises(CommError, match="rank 7 to read"):
        here.send(torch.tensor([SLOTS]), 1)
    buffers = [torch.zeros(1, dtype=torch.int64) for _ in range(SLOTS)]
    receives = [there.expect(buffer, 0) for buffer in buffers]
    with pytest.raises(AssertionError, match="out of order"):
        receives[1]()
    for receive in receives:
        receive()
    assert [int(buffer) for buffer in buffers] == [*range(SLOTS)]


def test_gathers_of_other_sizes_are_named_by_all_ranks_of_the_group():
    assert run_ranks(uneven_gather, 3) == [
        "",
        *[
            "an all-gather among ranks [1, 2] over shm failed: "
            "rank 2 gathers 24 bytes where rank 1 gathers 16"
        ]
        * 2,
    ]


def test_time_line_of_a_large_group_names_no_ranks():
    assert run_ranks(labels_of_rank, 2) == [["all-gather", "all-reduce"]] * 2
