"""A work of gloo ends for those that look at it, whatever its library raises."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from hires.comm.backends import rendezvous, waiting_threads
from hires.comm.backends.backend_protocol import RESERVED_TAGS, TAGS
from hires.comm.backends.gloo_backend import WIDENED_RANKS, GlooBackend, GlooWork, slot_of
from hires.comm.backends.local_sums import COMBINE, reduce_in_order
from hires.comm.backends.waiting_threads import WaitingThreads
from hires.core.ranks import ports
from hires.core.ranks.world import World
from tests.helpers import disagreements
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.ranks import run_ranks
from tests.helpers.thread_ranks import run_threads


class Failing:
    """As a work of the library."""

    def wait(self) -> None:
        raise ValueError("an address of another kind")


def test_work_that_fails_with_any_error_is_complete_and_raises_it():
    work = GlooWork(Failing())
    until(work.is_completed)
    with pytest.raises(ValueError, match="an address of another kind"):
        work.wait()


def test_calls_that_wait_have_a_thread_each_which_later_ones_use_again(monkeypatch):
    monkeypatch.setattr(waiting_threads, "IDLE_S", 0.2)
    pool, names, gate = WaitingThreads(), set(), threading.Event()
    for _ in range(50):  # one after the other
        done = threading.Event()
        pool.run(lambda done=done: (names.add(threading.get_ident()), done.set()))
        until(done.is_set)
        until(lambda: pool._num_free == 1)
    assert len(names) == 1
    for _ in range(5):
        pool.run(gate.wait)
    done = threading.Event()
    pool.run(done.set)  # not behind those that wait
    until(done.is_set)
    gate.set()
    until(lambda: pool._num_free == 0)  # all have ended


def test_call_without_a_thread_is_an_error_and_does_not_run_later(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, ran = WaitingThreads(), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.run(lambda: ran.append("first"))
    pool.run(lambda: ran.append("second"))
    pool.drain(PATIENCE_S)
    assert ran == ["second"]


def test_tags_and_sizes_of_messages_have_slots_of_their_own():
    tags = [*range(3072), 3072, 2**30, 2**31 - 2**26 - 1, *range(RESERVED_TAGS, TAGS)]
    for sizes in ((0, 1, 8, 16), (4096, 8192, 2**20, 2**21, 3 * 2**20)):
        slots = {slot_of(tag, size) for tag in tags for size in sizes}
        assert len(slots) == 3 + (len(tags) - 3) * len(sizes)
        assert 0 <= min(slots) <= max(slots) < TAGS
    with pytest.raises(ValueError, match="beyond those of gloo"):
        slot_of(2**31 - 2**26, 8)


@pytest.mark.dist
def test_sums_of_unequal_sizes_are_named_and_kill_no_rank():
    # gloo ended the process of the rank that gives less.
    told = run_ranks(disagreements.unequal_sums, 2)
    words = "rank 0 calls all_reduce of 20 B float32 (sum) over gloo at disagreements.py:"
    assert any(
        words in text and "where rank 1 calls all_reduce of 16000 B" in text for text in told
    )


@pytest.mark.dist
def test_message_larger_than_its_receive_names_both_sizes_and_kills_no_rank():
    for text in run_ranks(disagreements.unequal_sides, 2, {"numel": [4, 2]}):
        assert "rank 0 calls send of 16 B float32 over gloo at disagreements.py:" in text
        assert "rank 1 calls recv of 8 B float32 over gloo at disagreements.py:" in text


@pytest.mark.dist
def test_wrong_tag_names_the_tags_of_both_sides():
    for text in run_ranks(disagreements.unequal_sides, 2, {"tags": [3, 4]}):
        assert "rank 0 sends tag 3, and rank 1 waits for tag 4" in text


@pytest.mark.dist
def test_operation_in_a_callback_that_another_rank_does_not_call_is_an_error_within_the_limit():
    # As PowerSGD's hook has them, where ranks come to their callbacks in different orders.
    text, _ = run_ranks(disagreements.callback_alone, 2)
    assert "rank 0 waits in all_reduce of 20 B float32 (sum) over gloo at disagreements.py:" in text
    assert "to which rank 1 has not come" in text


ENDS_EARLY = """
import sys, time
from hires import comm
from hires.core.ranks.world import World
rank, port = map(int, sys.argv[1:])
comm.init(["gloo"], world=World(rank, 2, rank, 2, "127.0.0.1", port, 0), timeout_s=30.0)
import torch
handle = comm.irecv(torch.zeros(4), 1 - rank)
assert not handle.is_completed()
future = handle.get_future()
time.sleep(0.2)  # the threads are in the library
"""


@pytest.mark.slow
@pytest.mark.dist
def test_process_ends_well_while_threads_wait_in_the_library():
    with ports.reserve(0) as port:
        commands = [[sys.executable, "-c", ENDS_EARLY, str(rank), str(port)] for rank in range(2)]
        ranks = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
        try:
            ended = [(one.communicate(timeout=60)[1].decode(), one.returncode) for one in ranks]
        finally:
            for one in ranks:
                one.kill()
    assert [code for _, code in ended] == [0, 0], ended


@pytest.mark.dist
@pytest.mark.parametrize("async_op", [False, True])
def test_sums_of_int16_among_several_ranks_are_the_bits_of_sums_in_order(async_op, monkeypatch):
    """Every rank sent all of it to every other one."""
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "store", lambda *_: store)
    ranks = [GlooBackend() for _ in range(WIDENED_RANKS)]
    made = torch.Generator().manual_seed(0)
    whole = (-(2**15), 2**15)  # sums and products overflow, as those of int16 do
    terms = [torch.randint(*whole, (7, 3), generator=made).short() for _ in ranks]

    def job(rank: int) -> list[torch.Tensor]:
        world = World(rank, len(ranks), rank, len(ranks), "127.0.0.1", 29500, 0)
        ranks[rank].join(world, PATIENCE_S)
        monkeypatch.setattr(ranks[rank], "isend", None)
        reduced = []
        for op in COMBINE:
            own = terms[rank].clone()
            work = ranks[rank].all_reduce(own, op, async_op=async_op)
            if async_op:
                work.wait()
            reduced.append(own)
        ranks[rank].destroy_process_group()
        return reduced

    for found in run_threads(job, len(ranks)):
        for op, one in zip(COMBINE, found, strict=True):
            expected = torch.empty_like(one)
            reduce_in_order(terms, op, expected)
            assert one.dtype == torch.int16
            assert torch.equal(one, expected), op
