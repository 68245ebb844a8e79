"""Waits for shared counters sleep, and no wake-up is lost, however threads or processes meet."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import threading
import time

import pytest

from hires.comm.backends import counters
from hires.comm.backends.counters import Counters
from hires.core.errors import CommError, EndedError
from hires.core.store import provenance
from tests.helpers.patience import PATIENCE_S

HAND_OVERS = 3000
LONG_S = 20.0
"""No rank that runs lets another one sleep for so long."""


def pair(num_ranks: int = 2, spins: int = 0, timeout_s: float = PATIENCE_S) -> list[Counters]:
    """Returns the counters of ranks 5, 7 and so on."""
    memory = memoryview(mmap.mmap(-1, counters.num_bytes(num_ranks, num_ranks)))
    ranks = range(5, 5 + 2 * num_ranks, 2)
    return [Counters(memory, num_ranks, i, timeout_s, spins, ranks) for i in range(num_ranks)]


def test_wait_for_a_process_that_has_ended_ends():
    first, second, third = pair(3)
    with subprocess.Popen(["sleep", "1000"]) as process:
        birth = provenance._birth(process.pid)
        second._note_process(process.pid, birth)
        assert not any(first.has_ended(member) for member in range(3))
        process.kill()
    with pytest.raises(EndedError, match="waiting for a gather of rank 7: it has ended") as error:
        first.wait(1, 1, "a gather of rank %d", 1)
    assert error.value.ranks == (7,)
    first.arrive(range(3), 1)
    with pytest.raises(EndedError, match="waiting for the others: rank 7 has ended"):
        first.meet(range(3), 1, "the others")  # rank 9 is late, and lives
    third._note_process(os.getpid(), birth)  # its number was given to another process
    assert first.has_ended(2)
    third._space += 1
    third._note_process(process.pid, birth)  # numbers of another name space
    assert not first.has_ended(2)


def hand_over(here: Counters, index: int) -> None:
    """Counts in turns with the other rank."""
    for number in range(1, HAND_OVERS + 1):
        if index:
            here.wait(0, number, "its turn")
        here.values[index] = number
        here.wake(1 - index)
        if not index:
            here.wait(1, number, "its turn")


def meet(here: Counters, index: int) -> None:
    """All ranks come together again and again."""
    for number in range(1, HAND_OVERS + 1):
        here.arrive(range(3), number)
        for member in range(3):
            here.wait(member, number, "rank %d", member)


@pytest.mark.parametrize("spins", [0, 1, 100])
@pytest.mark.parametrize(("job", "num_ranks"), [(hand_over, 2), (meet, 3)])
def test_no_wake_up_is_lost_between_processes_on_one_core(job, num_ranks, spins, monkeypatch):
    """A lost one would show as a sleep that ends by its limit with its counter reached."""
    context = multiprocessing.get_context("fork")
    lost = context.Value("i", 0)
    doze = Counters.doze

    def counted(self, address, limit_s):
        begin = time.monotonic()
        if not doze(self, address, LONG_S) and time.monotonic() - begin >= LONG_S:
            with lost.get_lock():
                lost.value += 1
        return True

    monkeypatch.setattr(Counters, "doze", counted)
    ranks = pair(num_ranks, spins)

    def rank(index):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        job(ranks[index], index)
        os._exit(0)

    processes = [context.Process(target=rank, args=(i,), daemon=True) for i in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * num_ranks
    assert lost.value == 0


def test_several_threads_of_a_rank_sleep_on_one_word():
    here, there = pair()
    done = []
    waits = [
        threading.Thread(target=lambda n=n: (here.wait(1, n, "it"), done.append(n)))
        for n in range(1, 21)
    ]
    for wait in waits:
        wait.start()
    for number in range(1, 21):
        there.values[1] = number
        there.wake(0)
    for wait in waits:
        wait.join(PATIENCE_S)
    assert sorted(done) == [*range(1, 21)]


def test_wait_for_a_rank_that_died_ends_in_time_and_names_it():
    here, _ = pair(timeout_s=0.05)
    with pytest.raises(CommError, match=r"waiting for rank 7 took over 0\.05 s"):
        here.wait(1, 1, "rank %d", 1)
