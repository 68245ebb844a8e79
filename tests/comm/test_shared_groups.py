"""The groups of one machine: memory is shared by all members or by none, and is given back."""

from __future__ import annotations

import datetime
import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from hires.comm.backends import rendezvous, shared
from hires.comm.backends.shared import SharedMemory
from hires.comm.backends.shm_backend import ShmBackend
from hires.core.errors import CommError
from hires.core.ranks import memory_files
from hires.core.ranks.mailbox_limits import MAIL_BYTES, SLOTS
from hires.core.ranks.world import World
from tests.helpers import comm_jobs
from tests.helpers.ranks import run_ranks
from tests.helpers.thread_ranks import run_threads

RANKS, LIMIT_S = 3, 15.0


def memory_of(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def join(backends: list[ShmBackend], local_size: int = RANKS) -> None:
    rendezvous.leave()
    run_threads(lambda rank: backends[rank].join(world(rank, local_size), LIMIT_S), RANKS)


def world(rank: int, local_size: int = RANKS) -> World:
    return World(rank, RANKS, rank % local_size, local_size, "127.0.0.1", 29500, 0)


@pytest.fixture
def backends() -> Any:
    made = [ShmBackend() for _ in range(RANKS)]
    join(made)
    yield made
    for one in made:
        one.destroy_process_group()
        assert not one.is_initialized()


def test_group_that_was_destroyed_gives_its_memory_back_and_has_its_own_timeout(backends):
    def job(rank: int) -> None:
        one = backends[rank]
        for _ in range(5):
            group, tensor = one.new_group(), torch.ones(3000)
            one.all_reduce(tensor, group=group, async_op=True).wait()
            assert (tensor == RANKS).all()
            one.destroy_group(group)
        with pytest.raises(ValueError, match="not a member"):
            one.barrier(group)

    def num_mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("hires-")

    run_threads(job, RANKS)
    before = num_mappings()
    run_threads(job, RANKS)
    assert num_mappings() == before > 0
    short = datetime.timedelta(seconds=0.05)
    one = run_threads(lambda rank: backends[rank].new_group(timeout=short), RANKS)[0]
    for post in (backends[0].irecv, backends[0].isend):  # too long for a send to end alone
        with pytest.raises(CommError, match=r"took over 0\.05 s"):
            post(torch.zeros(100_000), 1, group=one, tag=4).wait()


def test_ranks_of_several_machines_and_other_processors_are_refused(monkeypatch):
    with pytest.raises(CommError, match="this one has 1 of the 3 ranks; use gloo or mpi"):
        ShmBackend().join(world(0, 1), LIMIT_S)
    monkeypatch.setattr(memory_files, "is_supported", lambda: False)
    with pytest.raises(CommError, match="backend shm needs a processor that keeps"):
        ShmBackend().join(world(0), LIMIT_S)


def unseen(name: str) -> int:
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (("free_bytes", lambda: 1000), "memory in .*: 1000 B free; free"),
        # As in ranks in containers of their own.
        (("open_file", unseen), "is not visible to all ranks"),
    ],
)
def test_memory_that_ranks_do_not_share_is_refused_by_all(function, text, monkeypatch):
    monkeypatch.setattr(memory_files, *function)

    class Refused(ShmBackend):
        def join(self, world: World, timeout_s: float) -> None:
            with pytest.raises(CommError, match=text):
                super().join(world, timeout_s)

    join([Refused() for _ in range(RANKS)])


@pytest.mark.dist
def test_rank_that_was_killed_ends_the_waits_of_the_others_and_leaves_no_file():
    before = {*Path("/dev/shm").glob("hires-*")}
    told, _ = run_ranks(comm_jobs.killed, 2, ["shm"])
    received, sent, first, later = told
    # Long before the limit of these waits, which is that of the test.
    assert "message of rank 1 with tag 0 (4 bytes): rank 1 has ended" in received
    assert "send to rank 1" in sent
    for text in (sent, first, later):
        assert "rank 1 has ended" in text
    assert {*Path("/dev/shm").glob("hires-*")} <= before


def test_mailboxes_have_the_places_that_the_proof_counts_on():
    memory = memory_of(shared.num_bytes(2, MAIL_BYTES))
    here, there = (SharedMemory(memory, [3, 7], index, 0.05, MAIL_BYTES) for index in (0, 1))
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


@pytest.mark.dist
def test_sums_are_the_same_bits_on_all_ranks():
    sizes = [5, 200_001, 270_000, 2**18, 1, 70_000]
    answers = run_ranks(comm_jobs.sums_of_rank, 3, sizes)
    # A tensor of 1 MiB or more is summed in place and the others as one of a type.
    assert [messages for _, messages in answers] == [[270_000, 2**18, 270_007, 15]] * 3
    sums = [found for found, _ in answers]
    assert sums[0] == sums[1] == sums[2]
    own = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for size, found in zip(sizes, sums[0], strict=False):
        expected = sum(torch.randn(size, generator=g).double() for g in own)
        assert torch.allclose(torch.tensor(found).double(), expected, atol=1e-5)
    assert sums[0][-1] == [4.5] * 15


@pytest.mark.dist
def test_gathers_keep_their_order_when_ranks_are_late_and_name_those_of_other_sizes():
    before = {*Path("/dev/shm").glob("hires-*")}
    for rank, (wrong, told) in enumerate(run_ranks(comm_jobs.many_gathers, 3, 300)):
        assert wrong == 0
        text = "an all-gather among ranks [1, 2] over shm failed: rank 2 gathers 24 bytes where "
        assert told == (text + "rank 1 gathers 16" if rank else "")
    assert {*Path("/dev/shm").glob("hires-*")} <= before


@pytest.mark.dist
def test_full_shared_memory_is_named_by_all_members():
    """It was used up to the last byte, and then the ranks went without, and said nothing."""
    first, second = run_ranks(comm_jobs.no_room, 2)
    assert first == second
    assert "the exchange of ranks 0 to 1 needs" in first
    assert first.endswith("comm.shared_memory=false, and a backend other than shm")


@pytest.mark.dist
def test_parts_are_summed_and_gathered_in_memory_and_in_buffers():
    assert run_ranks(comm_jobs.divided_parts, 2) == [[], []]
