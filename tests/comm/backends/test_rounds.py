"""What ranks exchange through shared memory is what a plain program gives, for any size."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch
import torch.distributed as dist

from hires.comm.backends import rounds
from hires.comm.backends.local_sums import has_reduction, reduce_in_order
from hires.comm.backends.rounds import Rounds
from hires.core.errors import CommError
from tests.helpers.thread_ranks import run_threads

RANKS = 3
SIZES = (0, 1, 5, 130, 1023, 1024, 5000)
"""Numbers of a tensor; a slot holds 768 bytes here."""


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch):
    monkeypatch.setattr(rounds, "SLOT_BYTES", 1000)
    monkeypatch.setattr(rounds, "WHOLE_BYTES", 64)


def group(num_ranks: int = RANKS, timeout_s: float = 60.0) -> list[Rounds]:
    memory = memoryview(mmap.mmap(-1, rounds.num_bytes(num_ranks)))
    return [Rounds(memory, range(num_ranks), rank, timeout_s, 0) for rank in range(num_ranks)]


def numbers(rank: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * rank + size)
    return torch.randint(-3, 4, (size,), generator=made).to(dtype)


def test_each_rank_gets_the_tensors_of_all_and_sizes_may_differ():
    ranks = group()

    def job(rank):
        for size in SIZES:
            taken = [torch.zeros(size + r).double() for r in range(RANKS)]
            ranks[rank].share(numbers(rank, size + rank), taken)
            assert all(torch.equal(t, numbers(r, size + r)) for r, t in enumerate(taken))

    run_threads(job, RANKS)


def test_one_rank_gives_to_all_and_all_to_one():
    ranks = group()

    def job(rank):
        for size in SIZES:
            for root in range(RANKS):
                none, own = [None] * RANKS, numbers(rank, size)
                taken = [*none]
                taken[root] = None if rank == root else torch.zeros(size).double()
                ranks[rank].share(own if rank == root else None, taken)
                assert rank == root or torch.equal(taken[root], numbers(root, size))
                taken = [torch.zeros_like(own) for _ in none] if rank == root else none
                ranks[rank].share(own, taken)
                assert rank != root or all(
                    torch.equal(t, numbers(r, size)) for r, t in enumerate(taken)
                )
            ranks[rank].barrier()

    run_threads(job, RANKS)


def test_each_rank_deals_a_part_to_each_and_sizes_may_differ():
    ranks = group()

    def part(source, target, size):
        return numbers(10 * source + target, size * (source + 2 * target))

    def job(rank):
        for size in SIZES:
            given = [part(rank, target, size) for target in range(RANKS)]
            taken = [torch.zeros_like(part(source, rank, size)) for source in range(RANKS)]
            ranks[rank].deal(given, taken)
            assert all(torch.equal(t, part(r, rank, size)) for r, t in enumerate(taken))

    run_threads(job, RANKS)


TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
TYPES += (torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_reductions_give_the_same_bits_on_all_ranks_for_every_type(name):
    ranks, op = group(), getattr(dist.ReduceOp, name)

    def job(rank):
        for dtype in (dtype for dtype in TYPES if has_reduction(op, dtype)):
            for size in SIZES:
                terms = [numbers(r, size, dtype) for r in range(RANKS)]
                expected, own = torch.empty_like(terms[0]), numbers(rank, size, dtype)
                reduce_in_order(terms, op, expected)
                ranks[rank].reduce(own, op)
                assert torch.equal(own, expected), (dtype, size)
                own = numbers(rank, size, dtype)
                ranks[rank].reduce(own, op, takes=rank == 1)
                assert rank != 1 or torch.equal(own, expected)

    run_threads(job, RANKS)


def test_reduce_scatter_sums_the_term_of_each_rank_and_sizes_may_differ():
    ranks = group()

    def term(source, target, size):
        return numbers(10 * source + target, size + 3 * target)

    def job(rank):
        for size in SIZES:
            output = torch.zeros_like(term(0, rank, size))
            given = [term(rank, target, size) for target in range(RANKS)]
            ranks[rank].reduce_scatter(output, given, dist.ReduceOp.SUM)
            assert torch.equal(output, sum(term(source, rank, size) for source in range(RANKS)))

    run_threads(job, RANKS)


def test_ranks_that_are_late_find_their_pieces_unharmed():
    ranks, pause = group(), threading.Event()

    def job(rank):
        for number in range(60):
            if number % RANKS == rank:
                pause.wait(0.002)
            own = torch.full((200,), float(number + rank))
            ranks[rank].reduce(own, dist.ReduceOp.SUM)
            assert (own == 3 * number + 3).all()
            taken = [torch.zeros(1) for _ in range(RANKS)]
            ranks[rank].share(torch.full((1,), float(number + rank)), taken)
            assert [int(t) for t in taken] == [number, number + 1, number + 2]

    run_threads(job, RANKS)


def test_ranks_in_different_operations_are_named():
    ranks = group()
    with pytest.raises(CommError, match=r"gives (8|16) bytes, and rank \d expects (8|16)"):
        run_threads(lambda rank: ranks[rank].reduce(numbers(0, 1 + rank), dist.ReduceOp.SUM), RANKS)


@pytest.mark.parametrize("size", [2, 1024])
@pytest.mark.parametrize("name", ["deal", "reduce_scatter"])
def test_parts_of_another_size_are_refused_and_leave_the_output(name, size):
    """What one rank gives to all is too short for the last."""
    ranks = group(timeout_s=0.5)
    outputs = [torch.full((size + (rank == RANKS - 1),), -1.0) for rank in range(RANKS)]

    def job(rank):
        given = [torch.ones(size)] * RANKS
        if name == "reduce_scatter":
            ranks[rank].reduce_scatter(outputs[rank], given, dist.ReduceOp.SUM)
        else:
            ranks[rank].deal(given if rank == 0 else [], [outputs[rank], None, None])

    def last_is_refused(rank):
        if rank == RANKS - 1:
            expected = rf"gives {4 * size} bytes, and rank 2 expects {4 * size + 4}"
            with pytest.raises(CommError, match=expected):
                job(rank)
        elif size == 1024:  # the others wait for it in the second round
            with pytest.raises(CommError, match=r"ranks \[2\] are behind"):
                job(rank)
        else:
            job(rank)

    run_threads(last_is_refused, RANKS)
    assert (outputs[-1] == -1).all()


def test_rank_that_does_not_come_is_named_in_time():
    here, *_ = group(timeout_s=0.05)
    with pytest.raises(CommError, match=r"took over 0\.05 s; ranks \[1, 2\] are behind"):
        here.barrier()


@pytest.mark.parametrize("num_ranks", [1, 2, 7, 64, 500])
def test_memory_of_a_group_is_bounded_and_holds_a_line_for_each_rank(num_ranks, monkeypatch):
    monkeypatch.undo()
    assert rounds.slot_bytes(num_ranks) % (128 * num_ranks) == 0
    counters_bytes = 4 * num_ranks * 128
    most = max(2 * rounds.ALL_SLOTS_BYTES, 512 * num_ranks**2)
    assert rounds.num_bytes(num_ranks) <= counters_bytes + most
