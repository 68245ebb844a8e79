"""Which rank failed first and why, what the page of a hang says, and what nodes report."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import hires
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.core.ranks import heartbeat
from hires.core.ranks.heartbeat import RankStatus, stacks_file
from hires.core.store.ends import END_REASONS, JOB_ENDS, End
from hires.core.store.provenance import collect
from hires.launcher.slurm.slurm_checks import node_checks
from hires.launcher.status.run_progress import last_lines
from hires.launcher.supervision import blame, watchdog
from hires.launcher.supervision.blame import OomCount, first_failure
from hires.launcher.supervision.watchdog import Hang
from hires.plan.event import Event
from hires.plan.stalled import Stall, Wait
from tests.helpers.launches import ROOT


@pytest.fixture
def world(tmp_path):
    """Returns a function that makes ended ranks from (code, seconds, log) each."""

    def make(*ends):
        ranks = []
        for number, (code, ended_s, text) in enumerate(ends):
            log = tmp_path / f"rank{number:04d}.log"
            log.write_text(text, errors="surrogateescape")
            os.utime(log, (ended_s, ended_s))
            ranks.append(SimpleNamespace(rank=number, log=log, code=code, ended_s=ended_s))
        return ranks

    return make


def failed(rank, second, kind, text):
    time = f"2030-01-01T00:00:{second:09.6f}+00:00"
    return {"event": "rank_failed", "time": time, "rank": rank, "type": kind, "text": text}


def test_rank_that_failed_first_is_named(world):
    broken = failed(1, 1.5, "RunError", "a.tif is broken")
    lost = [failed(rank, 1.0, "CommError", "lost rank 1") for rank in (0, 2)]
    for ends, ended, told, cause in (
        # The loss of a neighbour is a consequence, even if it was reported first.
        (((1, 1.0, ""), (1, 2.0, ""), (1, 1.0, "")), [0, 1, 2], [*lost, broken], "a.tif is broken"),
        (
            ((1, 1.0, ""), (1, 1.0, "")),
            [0, 1],
            [failed(0, 2.0, "CommError", "late"), failed(1, 1.0, "CommError", "early")],
            "rank 1 failed: early",
        ),
        # SIGKILL leaves no time to report.
        (
            ((1, 1.0, "Traceback"), (-9, 1.5, "")),
            [0, 1],
            [failed(0, 1.0, "RuntimeError", "connection closed by peer")],
            "rank 1 was killed by SIGKILL (by `kill -9`, or the system ran out of memory)",
        ),
        # A rank that reported an error is blamed even if the supervisor stopped it.
        (
            ((-15, 3.0, ""), (1, 1.0, "Connection reset\n")),
            [1],
            [failed(0, 0.5, "RunError", "disk full"), failed(1, 0.9, "CommError", "lost 0")],
            "rank 0 failed: disk full",
        ),
        (((3, 1.0, ""),), [0], [], "rank 0 exited with code 3"),
        (((-63, 1.0, ""),), [0], [], "killed by signal 63"),
    ):
        assert cause in first_failure(world(*ends), ended, told).cause


def test_of_two_found_dead_at_once_the_first_to_fall_silent_is_named(world):
    ranks = world((1, 5.0, "x\n"), (1, 5.0, "\udcff\n" * 100_000 + "boom\n\n"))
    os.utime(ranks[1].log, (1.0, 1.0))
    failure = first_failure(ranks, [0, 1], [])
    assert failure.cause == "rank 1 exited with code 1: boom"
    assert failure.tail[-1] == "boom"
    assert last_lines(ranks[0].log.with_name("none.log")) == []


def test_error_of_a_rank_or_the_kernel_proves_the_reason(world, tmp_path, monkeypatch):
    allocation = "[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 TB"
    for kind, text, reason in (
        ("LossError", "the loss is nan at step 3", "nan"),
        ("ParityError", "the layout differs from one process by 2e-3", "parity"),
        ("RuntimeError", allocation, "oom"),
        ("MemoryError", "", "oom"),
        ("CommError", "a receive from rank 1 failed: Timed out waiting 90000ms", "hang"),
        ("CommError", "a receive from rank 1 failed: Connection reset by peer", None),
        ("RunError", "a.tif is broken", None),
    ):
        failure = first_failure(world((1, 1.0, "")), [0], [failed(0, 1.0, kind, text)])
        assert failure.reason == reason
    file = tmp_path / "memory.events"
    file.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(blame, "_counters", lambda: [tmp_path / "missing", file])
    log = tmp_path / "launcher.log"
    ranks, count = world((-9, 1.0, "")), OomCount(log)
    assert first_failure(ranks, [0], [], count.rose()).reason is None
    file.write_text("oom 4\noom_kill 3\n")
    failure = first_failure(ranks, [0], [], count.rose())
    assert failure.reason == "oom"
    assert f"(memory was exhausted: oom_kill in {file} rose from 2 to 3)" in failure.cause
    file.unlink()
    assert count.rose() is None
    # The kernel counts for each step of a Slurm job by itself, on every node.
    for event in ("oom-kill event(s)", "oom_kill event"):  # of Slurm 20 and of later ones
        killed = f"error: Detected 1 {event} in StepId=7.0. Some of the step tasks have been OOM"
        text = f"step 3\nslurmstepd-n2: {killed} Killed.\nsrun: error: n2: task 1: Killed\n"
        log.write_text(text)
        assert first_failure(ranks, [0], [], count.rose()).reason == "oom"
    log.write_text(f"this rank prints {killed}\n")
    assert count.rose() is None


def test_reasons_decide_exit_codes_and_whether_jobs_start_again():
    again = ["preempted", "requeued", "timeout", "node"]
    assert [word for word in END_REASONS if End("failed", reason=word).restarts] == again
    assert not End("failed").restarts
    ends = {"CANCELLED": ("cancelled", None), "DEADLINE": ("failed", "timeout")}
    ends |= {"BOOT_FAIL": ("failed", "node"), "OUT_OF_MEMORY": ("failed", "oom")}
    assert ends.items() <= JOB_ENDS.items()
    for state, reason, code in (
        ("done", None, 0),
        ("failed", None, 1),
        ("failed", "node", 1),
        ("failed", "preempted", 75),
        ("failed", "timeout", 75),
        ("lost", None, 1),
        ("cancelled", None, 130),
    ):
        assert End(state, reason=reason).exit_code == code
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert {word: rows.get(word) for word in END_REASONS} == {
        word: reason.evidence for word, reason in END_REASONS.items()
    }


def test_silent_heart_is_noticed_by_the_watchers_own_clock(tmp_path, monkeypatch):
    (tmp_path / "alive").mkdir()
    beat = tmp_path / "alive" / "rank0000"
    beat.touch()
    os.utime(beat, (1.0, 1.0))  # as after a laptop has slept, or on another machine's clock
    clock = iter(float(second) for second in [0, *range(0, 100, 10)])
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    dog = watchdog.Watchdog(tmp_path, timeout_s=15.0)
    assert [dog.look() for _ in range(3)] == [False, False, False]
    os.utime(beat, (2.0, 2.0))
    assert [dog.look() for _ in range(4)] == [False, False, False, True]
    assert not dog.look({0})  # it has ended well


def test_rank_that_never_shows_a_heartbeat_is_noticed(tmp_path, monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    dog = watchdog.Watchdog(tmp_path, timeout_s=10.0, world=2)
    clock.now_s = 10.0 * heartbeat.PREPARES
    assert not dog.look()
    clock.now_s += watchdog.SILENT_S + 1
    assert dog.look()
    assert not dog.look({0, 1})  # both have ended


STACKS = """Thread 0x01 (most recent call first):
  File "/x/hires/core/ranks/heartbeat.py", line 9 in _run

Current thread 0x02 (most recent call first):
  File "/x/mine.py", line 7 in doze
  File "/x/other.py", line 8 in step
"""


def test_page_of_a_hang_says_where_every_rank_stands(tmp_path: Path):
    receive = RankStatus(0, 3, "F1", "a receive from rank 1", 1, 5, since_s=9.0)
    found = Hang(tmp_path, {0: receive}, {}, 2, ages_s={0: 1.0, 1: 70.0})
    assert found.cause == (
        "no progress: rank 1 does not answer: no reason is known (last heartbeat 70 s ago)"
    )
    text = found.page()
    assert "rank 0 is in F1 of step 3 and waits in a receive from rank 1, 9.0 s" in text
    assert "no stack: it did not answer" in text
    stacks_file(tmp_path, 0).parent.mkdir()
    stacks_file(tmp_path, 0).write_text(STACKS)
    text = Hang(tmp_path, {0: RankStatus(0, 2, "B0", since_s=9.0)}, {}, 1).page()
    assert 'File "/x/mine.py", line 7 in doze' in text
    assert "heartbeat.py" not in text


def test_circle_is_named_and_many_ranks_still_make_one_page(tmp_path: Path):
    posts = [Event("recv", peer, 0, (2,), "float32") for peer in (1, 0)]
    waits = [Wait(0, "x", [1], 9.0, posts[0]), Wait(1, "y", [0], 8.0, posts[1])]
    found = Hang(tmp_path, {}, {}, 2, stall=Stall(waits, circle=[0, 1]))
    assert found.cause == (
        "no progress: ranks wait for each other in a circle; rank 0 waits for x from rank 1, "
        "since 9.0 s"
    )
    status = {rank: RankStatus(rank, 1, "", "a barrier of all ranks") for rank in range(511)}
    waits = [Wait(rank, "a barrier of all ranks", [511], 9.0) for rank in range(511)]
    text = Hang(tmp_path, status, {}, 512, stall=Stall(waits, [511])).page()
    assert "and 505 more ranks wait" in text
    assert "rank 511 does not answer" in text
    assert (text.count("no stack"), len(text.splitlines()) < 120) == (16, True)


HERE = collect()


def checks(first=None, second=None, device="auto", **both):
    reports = []
    for rank, changes in enumerate((first, second)):
        report = {key: HERE[key] for key in ("git", "python", "torch")} | {"node": f"n{rank}"}
        report |= {"host": f"h{rank}", "hires": hires.__version__, "gpus": [], "time": 1000.0}
        report |= {"address": "10.0.0.1", "interface": "ib0", "sees": True, "sum_s": 0.01}
        reports.append({**report, **both, **(changes or {})})
    config = RunConfig(launcher=LauncherConfig("slurm", nodes=2), device=device)
    return {check.name: check for check in node_checks(config, reports)}


def test_nodes_that_fit_together_are_all_ok():
    assert {(check.state, check.where) for check in checks().values()} == {("ok", "job")}
    assert "met at 10.0.0.1, talk over ib0" in checks()["network"].text
    one_machine = checks(second={"host": "h0"}, address="127.0.0.1")
    assert one_machine["network"].state == "ok"


@pytest.mark.parametrize(
    ("name", "state", "text", "change"),
    [
        ("versions", "failed", "n1 has hires 9.9", {"second": {"hires": "9.9"}}),
        ("versions", "failed", "n0 has git other", {"first": {"git": "other"}}),
        ("versions", "failed", "n1 has torch 2.0", {"second": {"torch": "2.0"}}),
        ("gpus", "warning", "n0: 0, n1: 1", {"second": {"gpus": ["H200"]}}),
        ("gpus", "failed", "but device=cuda", {"device": "cuda"}),
        ("clock", "warning", "n1 is -7.0 s from n0", {"second": {"time": 993.0}}),
        ("shared", "failed", "n1 does not see files of n0", {"second": {"sees": False}}),
        ("network", "failed", "of the machine itself", {"address": "127.0.0.1"}),
        ("network", "failed", "a sum over all ranks", {"second": {"sum_s": None}}),
        ("network", "warning", "takes 1.00 s", {"second": {"sum_s": 1.0}}),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(name, state, text, change):
    found = checks(**change)
    assert found[name].state == state
    assert text in found[name].text
    assert found[name].remedy
    assert [check.name for check in found.values() if check.state != "ok"] == [name]
