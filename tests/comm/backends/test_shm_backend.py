"""Backends of one machine do what torch.distributed does: every operation, sizes, types, groups."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hires.comm.backends import attach, host_memory, rendezvous, rings, rounds
from hires.comm.backends.cma_backend import CmaBackend
from hires.comm.backends.shm_backend import ShmBackend
from hires.core.errors import CommError
from hires.core.ranks import memory_files
from hires.core.ranks.world import World
from tests.helpers.thread_ranks import run_threads

RANKS = 3


@pytest.fixture(autouse=True)
def _memory(monkeypatch):
    monkeypatch.setattr(rings, "CELL_BYTES", 1024)
    monkeypatch.setattr(rounds, "SLOT_BYTES", 2000)
    monkeypatch.setattr(rounds, "WHOLE_BYTES", 64)
    monkeypatch.setattr(attach, "CHUNK_BYTES", 1024)


def join(backends: list[ShmBackend]) -> None:
    """Joins a world of threads."""
    rendezvous.leave()
    run_threads(lambda rank: backends[rank].join(world(rank), 60.0), RANKS)


def world(rank: int, local_size: int = RANKS) -> World:
    return World(rank, RANKS, rank % local_size, local_size, "127.0.0.1", 29500, 0)


@pytest.fixture(params=[ShmBackend, CmaBackend])
def backends(request):
    made = [request.param() for _ in range(RANKS)]
    join(made)
    yield made
    for one in made:
        one.destroy_process_group()
        assert not one.is_initialized()


def numbers(rank: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * rank + size)
    return torch.randint(-3, 4, (size,), generator=made).to(dtype)


SIZES = (0, 1, 7, 300, 2500)


def test_reductions(backends):
    def job(rank):
        one = backends[rank]
        for size in SIZES:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                total = sum(numbers(r, size, dtype) for r in range(RANKS))
                own = numbers(rank, size, dtype)
                one.all_reduce(own)
                assert torch.equal(own, total)
                own = numbers(rank, size, dtype)
                one.reduce(own, 1)
                assert rank != 1 or torch.equal(own, total)
            largest = numbers(rank, size)
            one.all_reduce(largest, dist.ReduceOp.MAX)
            terms = [numbers(r, size) for r in range(RANKS)]
            assert torch.equal(largest, torch.stack(terms).max(0).values if size else largest)
            given = numbers(rank, RANKS * size).view(RANKS, size)
            output = torch.zeros(size).double()
            one.reduce_scatter_tensor(output, given)
            expected = sum(numbers(r, RANKS * size).view(RANKS, size)[rank] for r in range(RANKS))
            assert torch.equal(output, torch.as_tensor(expected))
            output = torch.zeros(size + rank).double()
            one.reduce_scatter(output, [numbers(rank, size + r) for r in range(RANKS)])
            assert torch.equal(output, sum(numbers(r, size + rank) for r in range(RANKS)))

    run_threads(job, RANKS)


def test_what_moves_tensors(backends):
    def job(rank):
        one = backends[rank]
        for size in SIZES:
            own = numbers(rank, size)
            sent = own.clone() if rank == 2 else torch.zeros_like(own)
            one.broadcast(sent, 2)
            assert torch.equal(sent, numbers(2, size))
            parts = [torch.zeros(size + r).double() for r in range(RANKS)]
            one.all_gather(parts, numbers(rank, size + rank))
            assert all(torch.equal(p, numbers(r, size + r)) for r, p in enumerate(parts))
            whole = torch.zeros(RANKS * size).double()
            one.all_gather_into_tensor(whole, own)
            assert torch.equal(whole, torch.cat([numbers(r, size) for r in range(RANKS)]))
            parts = [torch.zeros(size + r).double() for r in range(RANKS)]
            one.gather(numbers(rank, size + rank), parts if rank == 1 else None, 1)
            assert rank != 1 or all(
                torch.equal(p, numbers(r, size + r)) for r, p in enumerate(parts)
            )
            taken = torch.zeros(size + rank).double()
            given = [numbers(r, size + r) for r in range(RANKS)] if rank == 0 else None
            one.scatter(taken, given, 0)
            assert torch.equal(taken, numbers(rank, size + rank))
        one.barrier()

    run_threads(job, RANKS)


def test_all_to_all_with_equal_and_other_sizes(backends):
    def part(source, target, size):
        return numbers(10 * source + target, size * (source + 2 * target))

    def job(rank):
        one = backends[rank]
        for size in SIZES:
            taken = [torch.zeros_like(part(r, rank, size)) for r in range(RANKS)]
            one.all_to_all(taken, [part(rank, r, size) for r in range(RANKS)])
            assert all(torch.equal(t, part(r, rank, size)) for r, t in enumerate(taken))
            rows, given = [1, 2, 3], numbers(rank, 6 * size).view(6, size)
            output = torch.zeros(RANKS * rows[rank], size).double()
            one.all_to_all_single(output, given, [rows[rank]] * RANKS, rows)
            begin = sum(rows[:rank])
            expected = [
                numbers(r, 6 * size).view(6, size)[begin : begin + rows[rank]] for r in range(RANKS)
            ]
            assert torch.equal(output, torch.cat(expected))

    run_threads(job, RANKS)


def test_operations_under_way_at_once_in_groups_beside_messages(backends):
    """Collectives of two groups, begun in one order, and messages that pass them."""

    def job(rank):
        one, order = backends[rank], random.Random(rank)
        pair, every = one.new_group([0, 2]), one.new_group()
        works, checks = [], []
        for number in range(30):
            total = numbers(rank + number, 400)
            works.append(one.all_reduce(total, group=every, async_op=True))
            checks.append((total, sum(numbers(r + number, 400) for r in range(RANKS))))
            if rank != 1:
                total = numbers(rank + number, 50)
                works.append(one.all_reduce(total, group=pair, async_op=True))
                checks.append((total, numbers(number, 50) + numbers(2 + number, 50)))
            for peer in range(RANKS):
                works.append(one.isend(numbers(rank, 10 * number), peer, every, number))
                taken = torch.zeros(10 * number).double()
                works.append(one.irecv(taken, peer, every, number))
                checks.append((taken, numbers(peer, 10 * number)))
        order.shuffle(works)
        for work in works:
            assert work.wait()
            assert work.is_completed()
        assert all(torch.equal(found, expected) for found, expected in checks)
        if rank == 1:
            with pytest.raises(ValueError, match="rank 1 is not a member"):
                one.barrier(pair)
        else:
            with pytest.raises(ValueError, match=r"rank 1 is not among ranks \[0, 2\]"):
                one.isend(torch.zeros(1), 1, pair)

    run_threads(job, RANKS)


def test_group_that_was_destroyed_gives_its_memory_back(backends):
    def job(rank):
        one = backends[rank]
        for _ in range(5):
            group = one.new_group()
            tensor = torch.ones(3000)
            one.all_reduce(tensor, group=group, async_op=True).wait()
            assert (tensor == RANKS).all()
            one.destroy_group(group)
        with pytest.raises(ValueError, match="not a member"):
            one.barrier(group)

    run_threads(job, RANKS)
    before = num_mappings()
    run_threads(job, RANKS)
    assert num_mappings() == before > 0


def num_mappings() -> int:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sum("hires-" in line for line in maps.splitlines())


def test_message_in_a_group_has_the_timeout_of_the_group(backends):
    short = datetime.timedelta(seconds=0.05)
    one = run_threads(lambda rank: backends[rank].new_group(timeout=short), RANKS)[0]
    for post in (backends[0].irecv, backends[0].isend):  # too long for a send to end alone
        work = post(torch.zeros(1000), 1, group=one, tag=4)
        with pytest.raises(CommError, match=r"took over 0\.05 s"):
            work.wait()


def test_another_size_is_named(backends):
    def job(rank):
        with pytest.raises(CommError, match=r"gives \d+ bytes, and rank \d expects \d+"):
            backends[rank].all_reduce(torch.zeros(5 + rank))

    run_threads(job, RANKS)


@pytest.mark.parametrize("kind", [ShmBackend, CmaBackend])
def test_ranks_of_several_machines_and_other_processors_are_refused(kind, monkeypatch):
    with pytest.raises(CommError, match="this one has 1 of the 3 ranks; use gloo or mpi"):
        kind().join(world(0, 1), 60.0)
    monkeypatch.setattr(host_memory, "supported", lambda: False)
    with pytest.raises(CommError, match=rf"backend {kind.name} needs a processor that keeps"):
        kind().join(world(0), 60.0)


def refused(kind: type[ShmBackend], pattern: str) -> None:
    class Refused(kind):
        def join(self, world, timeout_s):
            with pytest.raises(CommError, match=pattern):
                super().join(world, timeout_s)

    join([Refused() for _ in range(RANKS)])


def test_memory_that_may_not_be_read_is_refused_by_all_ranks(monkeypatch, tmp_path):
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(attach, "YAMA", scope)
    monkeypatch.setattr(attach, "_reader", lambda: lambda *_: -1)
    refused(CmaBackend, r"--cap-add=SYS_PTRACE.*or use shm")
    scope.write_text("2\n")
    why = r"ptrace_scope is 2; set kernel.yama.ptrace_scope=1, or use shm"
    refused(CmaBackend, why)
    monkeypatch.setattr(attach, "_reader", lambda: None)
    refused(CmaBackend, "no process_vm_readv; use shm")


def test_full_shared_memory_is_named_by_all_ranks(monkeypatch):
    monkeypatch.setattr(memory_files, "free_bytes", lambda: 1000)
    why = r"KiB of shared memory in .*: 1000 B free; free some there"
    refused(ShmBackend, why)


def test_file_that_another_container_does_not_see_is_named_by_all_ranks(monkeypatch):
    def unseen(name: str) -> int:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(memory_files, "open_file", unseen)
    refused(ShmBackend, "is not visible to all ranks")
