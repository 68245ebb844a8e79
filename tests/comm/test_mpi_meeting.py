"""Members meet before a call of MPI that blocks, or all poll: threads as ranks, a fake MPI."""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from hires.comm.backends.mpi_meeting import AWAY, BLOCK, HERE, POLL, MpiMeeting
from hires.comm.backends.mpi_progress import Progress
from hires.core.errors import CommError

WORD = struct.Struct("qII")  # number, word, digest


class Done:
    def Test(self) -> bool:  # noqa: N802 - mpi4py's
        return True


class Wires:
    """What all members of a fake communicator share."""

    BYTE = "byte"

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: dict[tuple[int, int, int], queue.SimpleQueue] = defaultdict(queue.SimpleQueue)
        self.inside = threading.Barrier(size)  # of the call that blocks


class FakeComm:
    """One member's end of it."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank, self.size = wires, rank, wires.size
        self.sent: list[tuple[int, int]] = []

    def Isend(self, spec, place, tag):  # noqa: N802
        self.sent.append(WORD.unpack(spec[0])[:2])
        self.wires.queues[self.rank, place, tag].put(bytes(spec[0]))
        return Done()

    def Iprobe(self, place, tag):  # noqa: N802
        return not self.wires.queues[place, self.rank, tag].empty()

    def Recv(self, spec, place, tag):  # noqa: N802
        spec[0][:] = self.wires.queues[place, self.rank, tag].get_nowait()


class Rank:
    def __init__(self, wires: Wires, rank: int) -> None:
        self.progress = Progress(lambda: None)
        self.comm = FakeComm(wires, rank)
        self.meeting = MpiMeeting(wires, self.comm, 5, self.progress)
        self.entered = 0

    def join(
        self,
        may_block: bool = True,
        timeout_s: float = 30.0,
        late_s: float = 0.0,
        facts: tuple = (),
    ) -> bool:
        time.sleep(late_s)
        return self.meeting.together(self._enter, may_block, timeout_s, ("a sum", *facts))

    def _enter(self) -> None:
        assert self.progress.lock.locked()
        self.comm.wires.inside.wait(10.0)
        self.entered += 1


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(size: int) -> list[Rank]:
        wires = Wires(size)
        made.extend(Rank(wires, rank) for rank in range(size))
        return made

    yield make
    for rank in made:
        assert not rank.progress.blocks
        rank.progress.close()


def all_join(ranks: list[Rank], *each: dict) -> list[bool | str]:
    def one(rank: Rank, words: dict) -> bool | str:
        try:
            return rank.join(**words)
        except CommError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(one, ranks, each)]


def test_members_enter_the_call_together(ranks):
    three = ranks(3)
    for number in range(1, 6):
        late = [{"late_s": 0.01 * ((number + rank) % 3)} for rank in range(3)]
        assert all_join(three, *late) == [True] * 3
        assert [rank.entered for rank in three] == [number] * 3


@pytest.mark.parametrize("away", [0, 1, 2])
def test_all_poll_with_a_member_that_cannot_block_and_it_does_not_wait(ranks, away: int):
    three = ranks(3)
    for _ in range(5):
        begin_s = time.monotonic()
        assert three[away].join(may_block=False) is False
        assert time.monotonic() - begin_s < 5
    # It has gone on by five calls; each of the others still has its verdict.
    others = [rank for rank in three if rank is not three[away]]
    for _ in range(5):
        assert all_join(others, {}, {}) == [False, False]
    assert all_join(three, {}, {}, {}) == [True] * 3  # and none is left for the next call
    assert [rank.entered for rank in three] == [1, 1, 1]


@pytest.mark.parametrize("late", [0, 1])
def test_late_member_polls_since_the_other_has_given_up(ranks, late: int):
    """It stood in a blocking call for ever: the other had told it to come, and had left."""
    pair = ranks(2)
    with pytest.raises(CommError, match=r"a sum took over 0\.2 s"):
        pair[1 - late].join(timeout_s=0.2)
    assert pair[late].join() is False
    assert all_join(pair, {}, {}) == [True, True]


def test_member_whose_time_is_over_joins_where_its_verdict_was_on_the_way(ranks):
    pair = ranks(2)
    first, second = pair

    def decide() -> None:
        # The first member has read HERE, and its BLOCK crosses the AWAY of the other.
        while (1, AWAY) not in second.comm.sent:
            time.sleep(0.001)
        assert first.comm.Iprobe(1, 5)
        first.comm.Isend([WORD.pack(1, BLOCK, 0), None], 1, 6)
        first.comm.wires.inside.wait(10.0)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(decide)
        assert second.join(timeout_s=0.4) is True
        done.result()
    assert second.comm.sent == [(1, HERE), (1, AWAY)]


@pytest.mark.parametrize("other", [0, 1, 2])
def test_members_in_different_calls_poll(ranks, other: int):
    """They entered calls that wait for each other without a time limit."""
    three = ranks(3)
    each = [{"facts": (2**20, "SUM", int(rank == other))} for rank in range(3)]
    assert all_join(three, *each) == [False] * 3
    assert all_join(three, *[{"facts": (2**20, "SUM", 0)}] * 3) == [True] * 3
    assert [rank.entered for rank in three] == [1, 1, 1]


def test_another_thread_of_a_member_inside_polls(ranks):
    pair = ranks(2)
    pair[0].progress.blocks = True  # in a call of another group
    try:
        assert all_join(pair, {}, {}) == [False, False]
        assert pair[0].comm.sent == [(1, POLL)]
    finally:
        pair[0].progress.blocks = False


def test_interrupted_member_leaves(ranks):
    pair = ranks(2)

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    pair[1].meeting._verdict = interrupt
    with pytest.raises(KeyboardInterrupt):
        pair[1].join()
    assert pair[0].join() is False
