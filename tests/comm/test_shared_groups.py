"""The groups of one machine: memory is shared by all members or by none, and is given back."""

from __future__ import annotations

import datetime
import gc
import itertools
import os
import random
import re
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hires import comm
from hires.comm import coding
from hires.comm.backends import rendezvous
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.backends.shm_backend import ShmBackend
from hires.core.errors import CommError
from hires.core.ranks import meeting
from hires.core.ranks.world import World
from hires.plan.routes import Route
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.ranks import error_of, run_ranks
from tests.helpers.thread_ranks import run_threads

RANKS, LIMIT_S = 3, 15.0
MEMORY = Path("/dev/shm")


def join(backends: list[ShmBackend]) -> None:
    rendezvous.leave_all()
    run_threads(lambda rank: backends[rank].join(WorldMeeting(world(rank)), LIMIT_S), RANKS)


def world(rank: int, local_size: int = RANKS) -> World:
    # Their own secret: other programs may have ranks at this address.
    secret = f"of process {os.getpid()}"
    return World(rank, RANKS, rank % local_size, local_size, "127.0.0.1", 29500, 0, secret)


# ---- ranks that are threads


def test_group_that_was_destroyed_gives_its_memory_back_and_has_its_own_timeout():
    backends = [ShmBackend() for _ in range(RANKS)]
    join(backends)

    def job(rank: int) -> None:
        one = backends[rank]
        for _ in range(5):
            group, tensor = one.new_group([*range(RANKS)]), torch.ones(3000)
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
    group = run_threads(lambda rank: backends[rank].new_group([*range(RANKS)], short), RANKS)[0]
    for post in (backends[0].irecv, backends[0].isend):  # too long for a send to end alone
        with pytest.raises(CommError, match=r"took over 0\.05 s"):
            post(torch.zeros(100_000), 1, group=group, tag=4).wait()
    for backend in backends:
        backend.destroy_process_group()
        assert not backend.is_initialized()


def test_ranks_of_several_machines_and_other_processors_are_refused(monkeypatch):
    with pytest.raises(CommError, match="this one has 1 of the 3 ranks; use gloo or mpi"):
        ShmBackend().join(WorldMeeting(world(0, 1)), LIMIT_S)
    monkeypatch.setattr(meeting, "keeps_write_order", lambda: False)
    with pytest.raises(CommError, match="backend shm needs a processor that keeps"):
        ShmBackend().join(WorldMeeting(world(0)), LIMIT_S)


def unseen(name: str) -> int:
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (("free_memory", lambda: 1000), "memory in .*: 1000 B free; free"),
        (("open_memory_file", unseen), "is not visible to all ranks"),  # as ranks in containers
    ],
)
def test_memory_that_ranks_do_not_share_is_refused_by_all(function, text, monkeypatch):
    monkeypatch.setattr(meeting, *function)

    class Refused(ShmBackend):
        def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
            with pytest.raises(CommError, match=text):
                super().join(meeting, timeout_s)

    join([Refused() for _ in range(RANKS)])


# ---- ranks that are processes


def killed(world: World, backend: str) -> list[str]:
    """Returns how each kind of wait ended for a rank whose peer was killed in the meantime."""
    if world.rank == 1:  # a process of its own, so that this one can answer
        if not (child := os.fork()):
            try:
                comm.init([backend], world=world, timeout_s=PATIENCE_S)
                comm.new_group()
                comm.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        return []
    comm.init([backend], world=world, timeout_s=PATIENCE_S)
    group, numbers = comm.new_group(), torch.zeros(100_000)
    comm.barrier()
    waits = [
        lambda: comm.all_reduce(numbers, group=group),
        lambda: comm.recv(torch.zeros(1), 1),
        lambda: comm.send(numbers, 1),
    ]
    errors = [*map(error_of, waits if backend == "shm" else waits[:1])]
    error_of(comm.shutdown)
    return errors


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_rank_that_was_killed_ends_the_waits_of_the_others_and_leaves_no_file(backend: str):
    before = {*MEMORY.glob("hires-*")}
    errors, _ = run_ranks(killed, 2, backend)  # long before the limit, which is that of the test
    for error in errors:
        assert re.search(r"rank 1 (has ended|gives no answer: it has ended)", error), errors
    # Other tests have files there for a moment, at the same time.
    until(lambda: {*MEMORY.glob("hires-*")} <= before, "no file of these ranks")


def sums_of_rank(world: World, sizes: list[int]) -> tuple[list[list[float]], list[int]]:
    """Returns the sums of tensors, and the sizes of messages."""
    comm.init(["shm"], world=world, timeout_s=60)
    group = comm.make_groups([[*range(world.size)]])[0]
    generator = torch.Generator().manual_seed(world.rank)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors += [torch.full((3, 5), world.rank + 0.5, dtype=torch.float64)]
    messages, backend = list[int](), comm.default_world().backend
    all_reduce = backend.all_reduce
    backend.all_reduce = lambda sent, *args, **named: (
        messages.append(sent.numel()) or all_reduce(sent, *args, **named)
    )
    comm.all_reduce_coalesced(tensors, group)
    comm.barrier()
    comm.shutdown()
    return [tensor.flatten().tolist() for tensor in tensors], messages


@pytest.mark.dist
def test_sums_are_the_same_bits_on_all_ranks():
    sizes = [5, 200_001, 270_000, 2**18, 1, 70_000]
    answers = run_ranks(sums_of_rank, 3, sizes)
    # A tensor of 1 MiB or more is summed in place and the others as one of a type.
    assert [messages for _, messages in answers] == [[270_000, 2**18, 270_007, 15]] * 3
    sums = [of_rank for of_rank, _ in answers]
    assert sums[0] == sums[1] == sums[2]
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for size, total in zip(sizes, sums[0], strict=False):
        expected = sum(torch.randn(size, generator=g).double() for g in generators)
        assert torch.allclose(torch.tensor(total).double(), expected, atol=1e-5)
    assert sums[0][-1] == [4.5] * 15


def many_gathers(world: World) -> tuple[int, str, str, set[str]]:
    """Gathers again and again, each rank late in turn; returns how many answers were wrong.

    And the errors of a gather of tensors of two sizes, on ranks 1 and 2, and of a full memory, and
    the names of the files in memory.
    """
    comm.init(["shm"], world=world, timeout_s=60)
    groups = comm.make_groups([[*range(world.size)], [1, 2]])
    chance, wrong, mismatch = random.Random(world.rank), 0, ""
    for number in range(200):
        if chance.random() < 0.1:
            time.sleep(chance.random() / 200)
        gathered = comm.all_gather_stacked(torch.tensor([[number, world.rank]]), groups[0])
        wrong += gathered.tolist() != [[[number, rank]] for rank in range(world.size)]
    large = comm.all_gather_stacked(torch.full((100_000,), float(world.rank)), groups[0])
    wrong += large[:, -1].tolist() != [*range(world.size)]
    if world.rank:
        numbers = torch.zeros(1 + world.rank, dtype=torch.float64)
        mismatch = error_of(lambda: comm.all_gather_stacked(numbers, groups[1]))
    meeting.free_memory = lambda: 10**5
    full = error_of(lambda: comm.make_groups([[*range(world.size)]]))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    files = {*re.findall(rf"{MEMORY}/hires-\S+", maps)}
    error_of(comm.shutdown)
    return wrong, mismatch, full, files


@pytest.mark.dist
def test_gathers_keep_their_order_when_ranks_are_late_and_name_those_of_other_sizes():
    answers = run_ranks(many_gathers, 3)
    for rank, (wrong, mismatch, full, files) in enumerate(answers):
        assert wrong == 0
        assert files
        assert not [file for file in files if Path(file).exists()]
        assert ("an all-gather among ranks [1, 2] over shm failed: rank" in mismatch) == (rank > 0)
        assert full == answers[0][2]
        assert "the memory for collectives of ranks 0 to 2 needs" in full
        assert full.endswith("comm.shared_memory=false, and a backend other than shm")


Parts = list[list[Tensor]]


def divided_parts(world: World) -> list[str]:
    """Returns what is wrong with sums and gathers of parts."""
    comm.init(["gloo", "shm"], world=world, timeout_s=60)
    [group] = comm.make_groups([[*range(world.size)]]).values()
    coding.BUFFER_BYTES = 64  # several buffers
    wrong: list[str] = []

    def parts_of(sizes: list[list[int]], rank: int) -> Parts:
        facts = {"generator": torch.Generator().manual_seed(rank), "dtype": torch.float64}
        return [[torch.randn(size, **facts) for size in own] for own in sizes]

    def same(parts: Parts, others: Parts) -> bool:
        flat = (itertools.chain.from_iterable(some) for some in (parts, others))
        return all(torch.equal(*pair) for pair in zip(*flat, strict=True))

    for backend in (None, Route("shm")):
        for sizes in ([[3, 5, 2], [0, 9, 1]], [[], [7]], [[4], [4]]):
            before = [parts_of(sizes, rank) for rank in range(world.size)]
            sums = [
                [sum(terms) for terms in zip(*own, strict=True)]
                for own in zip(*before, strict=True)
            ]
            parts, expected = parts_of(sizes, world.rank), [*before[world.rank]]
            expected[world.rank] = sums[world.rank]
            comm.reduce_scatter_coalesced(parts, group, backend=backend)
            wrong += [f"sum of {sizes}"] * (not same(parts, expected))
            comm.all_gather_coalesced(parts, group, backend=backend)
            wrong += [f"gather of {sizes}"] * (not same(parts, sums))
    comm.shutdown()
    return wrong


@pytest.mark.dist
def test_parts_are_summed_and_gathered_in_memory_and_in_buffers():
    assert run_ranks(divided_parts, 2) == [[], []]
