"""The memory of one machine: waits end and are named, rings and rounds keep what is not read.

What its operations compute is in test_conformance.py. Ranks are threads that share memory alone, or
processes where waking and dying are the subject.
"""

from __future__ import annotations

import datetime
import mmap
import multiprocessing
import os
import subprocess
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hires.comm.backends import counters, rings, rounds
from hires.comm.backends.backend import reduce_in_order
from hires.comm.backends.counters import Counters
from hires.comm.backends.peer_messages import PeerMessages
from hires.comm.backends.rings import Rings
from hires.comm.backends.rounds import Rounds
from hires.core.errors import EndedError, PeerError
from hires.core.store import provenance
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.thread_ranks import run_threads

RANKS, LIMIT_S = 3, 15.0
"""Longest wait of a rank whose others run."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "CELL_BYTES", 512)
    monkeypatch.setattr(rounds, "SLOT_BYTES", 1000)
    monkeypatch.setattr(rounds, "WHOLE_BYTES", 64)


def memory_of(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


# ---- counters


def counters_of(num_ranks: int, spins: int = 0, timeout_s: float = LIMIT_S) -> list[Counters]:
    """Returns the counters of ranks 5, 7 and so on."""
    memory, ranks = memory_of(counters.num_bytes(num_ranks, num_ranks)), range(5, 99, 2)
    return [Counters(memory, num_ranks, i, timeout_s, spins, ranks) for i in range(num_ranks)]


def test_wait_for_a_process_that_has_ended_ends():
    first, second, third = counters_of(3)
    with subprocess.Popen(["sleep", "1000"]) as process:
        birth = provenance._birth(process.pid)
        second._note_process(process.pid, birth)
        assert not any(first.has_ended(member) for member in range(3))
        process.kill()
    first.arrive(range(3), 1)
    with pytest.raises(EndedError, match=r"^rank 7 has ended") as error:
        first.meet(range(3), 1)  # rank 9 is late, and lives
    assert error.value.ranks == (7,)
    third._note_process(os.getpid(), birth)  # its number was given to another process
    assert first.has_ended(2)
    third._space += 1
    third._note_process(process.pid, birth)  # numbers of another name space
    assert not first.has_ended(2)


def test_wait_ends_in_time_and_names_the_rank():
    (here, _), began_s = counters_of(2, timeout_s=0.05), time.monotonic()
    here.arrive(range(2), 1)
    with pytest.raises(PeerError, match=r"took over 0\.05 s; ranks \[7\] are behind"):
        here.meet(range(2), 1)
    assert time.monotonic() - began_s < LIMIT_S


@pytest.mark.parametrize(("num_ranks", "spins"), [(2, 0), (3, 100)])
def test_no_wake_up_is_lost_between_processes_on_one_core(num_ranks, spins, monkeypatch):
    """A lost one would show as a sleep that ends by its limit with its counter reached."""
    doze = Counters.doze

    def counted(self: Counters, address: int, limit_s: float) -> bool:
        begin_s = time.monotonic()
        if not doze(self, address, LIMIT_S) and time.monotonic() - begin_s >= LIMIT_S:
            os._exit(3)
        return True

    monkeypatch.setattr(Counters, "doze", counted)
    ranks, context = counters_of(num_ranks, spins, PATIENCE_S), multiprocessing.get_context("fork")

    def rank(index: int) -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for number in range(1, 2000):
            ranks[index].arrive(range(num_ranks), number)
            ranks[index].meet(range(num_ranks), number)
        os._exit(0)

    processes = [context.Process(target=rank, args=(i,), daemon=True) for i in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * num_ranks


# ---- messages


@pytest.fixture
def messages() -> Any:
    memory = memory_of(rings.num_bytes(RANKS))
    made = [PeerMessages(Rings(memory, RANKS, rank, LIMIT_S, 0)) for rank in range(RANKS)]
    yield made
    for one in made:
        one.close()
    assert "peer-messages" not in [thread.name for thread in threading.enumerate()]


def test_short_message_needs_no_receiver_and_a_long_one_only_its_post(messages):
    first, second, _ = messages
    assert first.isend(torch.ones(4), 1, 0, 0).is_completed()
    large = first.isend(torch.arange(10_000.0), 1, 0, 1)
    assert not large.is_completed()
    taken = torch.zeros(10_000)
    received = second.irecv(taken, 0, 0, 1)  # from here on its rank computes
    assert large.wait(datetime.timedelta(seconds=LIMIT_S))
    until(lambda: received.done)
    assert torch.equal(taken, torch.arange(10_000.0))
    assert second.irecv(torch.zeros(4), 0, 0, 0).is_completed()


def test_full_ring_is_read_while_its_reader_computes(messages):
    first, second, _ = messages
    taken = [torch.zeros(1, dtype=torch.uint8) for _ in range(100)]
    works = [second.irecv(one, 0, 0, n) for n, one in enumerate(taken)]
    works += [first.isend(torch.full((1,), n, dtype=torch.uint8), 1, 0, n) for n in range(100)]
    for work in reversed(works):
        work.wait()
    assert [int(one) for one in taken] == [*range(100)]


@pytest.mark.parametrize(("sent", "taken"), [(16, 12), (12, 16), (400, 20_000)])
def test_message_of_another_size_fails_on_both_sides(messages, sent: int, taken: int):
    first, second, _ = messages
    given = first.isend(torch.zeros(sent, dtype=torch.uint8), 1, 0, 6)
    buffer = torch.ones(taken, dtype=torch.uint8)
    work = second.irecv(buffer, 0, 0, 6)
    with pytest.raises(PeerError, match=rf"tag 6 \({taken} bytes\) has {sent} bytes"):
        work.wait()
    assert buffer.all()
    if sent > 384:  # it was announced
        text = rf"send to rank 1 with tag 6 \({sent} bytes\) is received as {taken} bytes"
        with pytest.raises(PeerError, match=text):
            given.wait(datetime.timedelta(seconds=LIMIT_S))
    with pytest.raises(PeerError, match=r"message of rank 0 with tag 5 .* took over 0\.05 s"):
        second.irecv(torch.zeros(3), 0, 0, 5).wait(datetime.timedelta(seconds=0.05))


# ---- rounds


def rounds_of(timeout_s: float = LIMIT_S) -> list[Rounds]:
    memory = memory_of(rounds.num_bytes(RANKS))
    return [Rounds(memory, range(RANKS), rank, timeout_s, 0) for rank in range(RANKS)]


def test_ranks_that_are_late_find_their_pieces_unharmed():
    ranks, pause = rounds_of(), threading.Event()

    def job(rank: int) -> None:
        for number in range(60):
            if number % RANKS == rank:
                pause.wait(0.002)
            own = torch.full((200,), float(number + rank))
            ranks[rank].reduce(own, own, dist.ReduceOp.SUM)
            assert (own == 3 * number + 3).all()
            taken = [torch.zeros(1) for _ in range(RANKS)]
            ranks[rank].share(torch.full((1,), float(number + rank)), taken)
            assert [int(t) for t in taken] == [number, number + 1, number + 2]

    run_threads(job, RANKS)


@pytest.mark.parametrize(("name", "size"), [("reduce_scatter", 2), ("reduce", 2), ("reduce", 1024)])
def test_parts_of_another_size_are_refused_and_leave_the_output(name: str, size: int):
    ranks = rounds_of(timeout_s=0.3)
    outputs = [torch.full((size + (rank == RANKS - 1),), -1.0) for rank in range(RANKS)]

    def job(rank: int) -> None:
        given, op = [torch.ones(size)] * RANKS, dist.ReduceOp.SUM
        if name == "reduce":
            ranks[rank].reduce(outputs[rank], outputs[rank], op)
        else:
            given[-1] = outputs[rank]
            ranks[rank].reduce_scatter(outputs[rank].clone(), given, op)

    def outcome(rank: int) -> str:
        try:
            job(rank)
        except PeerError as error:
            return str(error)
        return ""

    told = run_threads(outcome, RANKS)
    assert f"gives {4 * size} bytes, and rank 2 expects {4 * size + 4}" in told[-1]
    assert (outputs[-1] == -1).all()


def test_halves_are_rounded_once():
    # 2048 + 1 + 1 in fp16: rounded after each addition it would stay 2048.
    terms = [torch.tensor([value], dtype=torch.float16) for value in (2048.0, 1.0, 1.0)]
    reduce_in_order(terms, dist.ReduceOp.SUM, terms[1])
    assert terms[1].item() == 2050
    assert terms[0].item() == 2048  # a term stays as it was, also where there are three
