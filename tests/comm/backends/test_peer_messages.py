"""Messages between ranks of one machine arrive whole, by tag, whatever runs on their way."""

from __future__ import annotations

import datetime
import mmap
import random
import threading

import pytest
import torch

from hires.comm.backends import rings
from hires.comm.backends.host_memory import copy
from hires.comm.backends.peer_messages import PeerMessages
from hires.comm.backends.rings import Rings
from hires.core.errors import CommError
from tests.helpers.patience import until
from tests.helpers.thread_ranks import run_threads

RANKS = 3


@pytest.fixture(autouse=True)
def _small_cells(monkeypatch):
    monkeypatch.setattr(rings, "CELL_BYTES", 512)


@pytest.fixture(params=["by cells", "by reading"])
def messages(request):
    made = world(request.param == "by reading")
    yield made
    for one in made:
        one.close()
    assert "peer-messages" not in [thread.name for thread in threading.enumerate()]


def world(reads: bool = False, timeout_s: float = 60.0) -> list[PeerMessages]:
    memory = memoryview(mmap.mmap(-1, rings.num_bytes(RANKS)))
    pull = (lambda rank, here, there, size: copy(here, there, size)) if reads else None
    return [PeerMessages(Rings(memory, RANKS, r, timeout_s, 0), pull) for r in range(RANKS)]


def content(source: int, target: int, number: int) -> torch.Tensor:
    made = random.Random(f"{source} {target} {number}")
    size = made.choice([0, 1, 100, 384, 385, 400, 5000, 50_000])
    return torch.full((size,), number % 251, dtype=torch.uint8)


def test_many_messages_with_tags_in_any_order(messages):
    """Each rank posts all its receives and sends in an order of its own, and waits in another."""
    count = 60

    def job(rank):
        order, posts = random.Random(rank), []
        for peer in range(RANKS):  # to itself, too
            for number in range(count):
                posts += [("send", peer, number), ("recv", peer, number)]
        order.shuffle(posts)
        works = []
        for kind, peer, number in posts:
            if kind == "send":
                given = content(rank, peer, number)
                works.append((messages[rank].isend(given, peer, 1, number), None, None))
            else:
                expected = content(peer, rank, number)
                taken = torch.zeros_like(expected)
                works.append((messages[rank].irecv(taken, peer, 1, number), taken, expected))
        order.shuffle(works)
        for work, taken, expected in works:
            assert work.wait()
            assert taken is None or torch.equal(taken, expected)

    run_threads(job, RANKS)


def test_messages_with_one_tag_keep_their_order_and_groups_are_apart(messages):
    def job(rank):
        if rank == 0:
            given = [torch.full((n * 100,), n, dtype=torch.uint8) for n in range(30)]
            works = [messages[0].isend(g, 1, n % 2, 7) for n, g in enumerate(given)]
        elif rank == 1:
            taken = [torch.zeros(n * 100, dtype=torch.uint8) for n in range(30)]
            odd = [messages[1].irecv(taken[n], 0, 1, 7) for n in range(1, 30, 2)]
            works = odd + [messages[1].irecv(taken[n], 0, 0, 7) for n in range(0, 30, 2)]
        else:
            return
        for work in works:
            work.wait()
        assert rank == 0 or all((t == n).all() for n, t in enumerate(taken))

    run_threads(job, RANKS)


def test_short_message_needs_no_receiver_and_a_long_one_only_its_post(messages):
    first, second, _ = messages
    assert first.isend(torch.ones(4), 1, 0, 0).is_completed()
    large = first.isend(torch.ones(10_000), 1, 0, 1)
    assert not large.is_completed()
    taken = torch.zeros(10_000)
    received = second.irecv(taken, 0, 0, 1)  # from here on its rank computes
    assert large.wait(datetime.timedelta(seconds=60))
    until(lambda: received.done)
    assert taken.sum() == 10_000
    assert second.irecv(torch.zeros(4), 0, 0, 0).is_completed()


def test_full_ring_is_read_while_its_reader_computes(messages):
    first, second, _ = messages
    taken = [torch.zeros(1, dtype=torch.uint8) for _ in range(100)]
    receives = [second.irecv(one, 0, 0, n) for n, one in enumerate(taken)]
    sends = [first.isend(torch.full((1,), n, dtype=torch.uint8), 1, 0, n) for n in range(100)]
    for send in sends:
        send.wait()
    for receive in receives:
        receive.wait()
    assert [int(one) for one in taken] == [*range(100)]


def test_several_threads_of_a_rank_wait_at_once(messages):
    taken = [torch.zeros(1000 * n) for n in range(8)]
    works = [messages[1].irecv(one, 0, 0, n) for n, one in enumerate(taken)]

    def job(thread):
        if thread < 8:
            works[thread].wait()
        else:
            for n in reversed(range(8)):
                messages[0].isend(torch.ones(1000 * n), 1, 0, n).wait()

    run_threads(job, 9)
    assert [int(one.sum()) for one in taken] == [1000 * n for n in range(8)]


def test_room_that_is_made_while_a_thread_looks_is_used(messages, monkeypatch):
    """The reader finds this rank awake and wakes nobody; what waits for room must not stay."""
    first, second, _ = messages
    count = rings.CELLS + 1
    monkeypatch.setattr(first, "_start_helper", lambda _: None)
    sends = [first.isend(torch.ones(4), 1, 0, n) for n in range(count)]
    assert not sends[-1].is_completed()
    awaited = first.irecv(torch.zeros(4), 1, 0, 99)

    def spin(message):
        second.isend(torch.ones(4), 0, 0, 99)
        found = first.look(message)
        for number in range(rings.CELLS):
            second.irecv(torch.zeros(4), 0, 0, number).wait()
        return found

    monkeypatch.setattr(first, "_spin", spin)
    assert awaited.wait()
    assert sends[-1].done


def test_late_message_and_one_of_another_size_are_named(messages):
    first, second, _ = messages
    with pytest.raises(CommError, match=r"message of rank 0 with tag 5 .* took over 0\.05 s"):
        second.irecv(torch.zeros(3), 0, 0, 5).wait(datetime.timedelta(seconds=0.05))
    first.isend(torch.zeros(4), 1, 0, 6)
    work = second.irecv(torch.zeros(3), 0, 0, 6)
    with pytest.raises(CommError, match=r"tag 6 \(12 bytes\) has 16 bytes"):
        work.wait()
    assert isinstance(work.exception(), CommError)


def test_long_message_of_another_size_fails_on_both_sides(messages):
    first, second, _ = messages
    sent = first.isend(torch.zeros(20_000, dtype=torch.uint8), 1, 0, 6)
    work = second.irecv(torch.zeros(10_000, dtype=torch.uint8), 0, 0, 6)
    with pytest.raises(CommError, match=r"tag 6 \(10000 bytes\) has 20000 bytes"):
        work.wait()
    text = r"send to rank 1 with tag 6 \(20000 bytes\) is received as 10000 bytes"
    with pytest.raises(CommError, match=text):
        sent.wait(datetime.timedelta(seconds=20))
    assert not first._sending


@pytest.mark.parametrize("num_ranks", [1, 2, 16, 300])
def test_memory_of_the_rings_is_bounded(num_ranks, monkeypatch):
    monkeypatch.undo()
    cells = rings.CELLS * num_ranks**2 * rings.cell_bytes(num_ranks)
    assert cells <= max(rings.ALL_CELLS_BYTES, 2048 * num_ranks**2)
    assert rings.num_bytes(num_ranks) == cells + 128 * (2 * num_ranks + 2 * num_ranks**2)
