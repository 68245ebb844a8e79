import os
from types import SimpleNamespace

import pytest

from hires.launcher.ranks.rank_group import last_lines
from hires.launcher.supervision import blame
from hires.launcher.supervision.blame import OomCount, first_failure


@pytest.fixture
def world(tmp_path):
    """Returns a function that makes ended ranks from (code, seconds, log) each."""

    def make(*ends):
        ranks = []
        for number, (code, ended_s, text) in enumerate(ends):
            log = tmp_path / f"rank{number:04d}.log"
            log.write_text(text)
            os.utime(log, (ended_s, ended_s))
            ranks.append(SimpleNamespace(rank=number, log=log, code=code, ended_s=ended_s))
        return ranks

    return make


def failed(rank, second, kind, text):
    time = f"2030-01-01T00:00:{second:09.6f}+00:00"
    return {"event": "rank_failed", "time": time, "rank": rank, "type": kind, "text": text}


def test_lost_neighbour_is_a_consequence_even_if_it_spoke_first(world):
    ranks = world((1, 1.0, ""), (1, 2.0, ""), (1, 1.0, ""))
    told = [
        failed(0, 1.0, "CommError", "lost rank 1"),
        failed(1, 1.5, "RunError", "a.tif is broken"),
        failed(2, 1.2, "CommError", "lost rank 1"),
    ]
    failure = first_failure(ranks, [0, 1, 2], told)
    assert (failure.failed_rank, failure.cause) == (1, "rank 1 failed: a.tif is broken")


def test_if_all_lost_their_neighbours_the_first_is_named(world):
    ranks = world((1, 1.0, ""), (1, 1.0, ""))
    told = [failed(0, 2.0, "CommError", "late"), failed(1, 1.0, "CommError", "early")]
    assert first_failure(ranks, [0, 1], told).cause == "rank 1 failed: early"


def test_killed_rank_comes_before_everything(world):
    ranks = world((1, 1.0, "Traceback"), (-9, 1.5, ""))
    told = [failed(0, 1.0, "RuntimeError", "connection closed by peer")]
    failure = first_failure(ranks, [0, 1], told)
    assert failure.cause == (
        "rank 1 was killed by SIGKILL (by `kill -9`, or the system ran out of memory)"
    )


def test_rank_that_told_is_a_suspect_though_the_supervisor_stopped_it(world):
    ranks = world((-15, 3.0, ""), (1, 1.0, "Connection reset\n"))
    told = [failed(0, 0.5, "RunError", "disk full"), failed(1, 0.9, "CommError", "lost 0")]
    assert first_failure(ranks, [1], told).cause == "rank 0 failed: disk full"


def test_of_two_found_dead_at_once_the_first_to_fall_silent_is_named(world):
    ranks = world((1, 5.0, "x\n"), (1, 5.0, "boom\n\n"))
    os.utime(ranks[1].log, (1.0, 1.0))
    failure = first_failure(ranks, [0, 1], [])
    assert failure.cause == "rank 1 exited with code 1: boom"
    assert failure.tail == ["boom"]


def test_silent_rank_has_its_code_only(world):
    assert first_failure(world((3, 1.0, "")), [0], []).cause == "rank 0 exited with code 3"


def test_unknown_signal_has_its_number(world):
    assert "killed by signal 63" in first_failure(world((-63, 1.0, "")), [0], []).cause


def test_last_lines_of_a_long_log(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff\n" * 100_000 + b"".join(b"line %d\n" % i for i in range(50)))
    assert last_lines(log, 3) == ["line 47", "line 48", "line 49"]
    assert last_lines(tmp_path / "none.log") == []


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("LossError", "the loss is nan at step 3", "nan"),
        ("ParityError", "the layout differs from one process by 2e-3", "parity"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 TB", "oom"),
        ("MemoryError", "", "oom"),
        ("CommError", "a receive from rank 1 failed: Timed out waiting 90000ms", "hang"),
        ("CommError", "a receive from rank 1 failed: Connection reset by peer", None),
        ("RunError", "a.tif is broken", None),
    ],
)
def test_what_a_rank_said_tells_the_reason(world, kind, text, reason):
    told = [failed(0, 1.0, kind, text)]
    assert first_failure(world((1, 1.0, "")), [0], told).reason == reason


def test_sigkill_is_lack_of_memory_only_if_the_kernel_counted_it(world):
    ranks = world((-9, 1.0, ""))
    assert first_failure(ranks, [0], []).reason is None
    found = first_failure(ranks, [0], [], "oom_kill in memory.events rose from 0 to 1")
    assert found.reason == "oom"
    assert found.cause == (
        "rank 0 was killed by SIGKILL (memory was exhausted: oom_kill in memory.events rose from "
        "0 to 1)"
    )


@pytest.fixture
def counter(tmp_path, monkeypatch):
    file = tmp_path / "memory.events"
    file.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(blame, "_counters", lambda: [tmp_path / "missing", file])
    return file


def test_kill_since_the_start_is_evidence(counter):
    count = OomCount()
    assert count.rose() is None
    counter.write_text("oom 4\noom_kill 3\n")
    assert count.rose() == f"oom_kill in {counter} rose from 2 to 3"


def test_group_that_vanished_is_no_evidence(counter):
    count = OomCount()
    counter.unlink()
    assert count.rose() is None


def test_this_machine_has_a_counter_or_none():
    assert OomCount().rose() is None
