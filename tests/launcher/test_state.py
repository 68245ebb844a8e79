"""A run is in the state that its files, process and scheduler show, without accounts, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core.store import provenance
from hires.launcher import interface
from hires.launcher.interface import JobStatus
from hires.launcher.slurm import scheduler
from hires.launcher.status import state
from hires.launcher.status.run_progress import FinishedStep, MetricsTail, RunProgress
from hires.launcher.status.state import states
from tests.helpers.run_folders import beat, begin, done, end, make_run, steps, submitted

ELSEWHERE = {"host": "another-machine", "boot": "x", "pid": 1}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "AGAIN_S", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "results")


def says(*answers: JobStatus):
    """Returns a scheduler that gives these answers one after the other, the last for ever."""
    left = list(answers)

    def ask(jobs):
        answer = left.pop(0) if len(left) > 1 else left[0]
        return {scheduler.job_name(job): answer for job in jobs}

    return ask


def state_of(run: Path, ask=interface.job_states):
    """Returns the state of a run, whose job has the state that ``ask`` returns."""
    with mock.patch.object(interface, "job_states", ask):
        [found] = states([run])
    return found


def dead_process() -> dict:
    """Returns a process of this machine that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told = {**provenance.myself(), "pid": child.pid, "birth": provenance._birth(child.pid)}
    child.communicate(b"\n")
    return told


def test_running_run_shows_step_speed_and_memory(run):
    assert (state_of(run).state, state_of(run).attempt) == ("pending", None)
    steps(begin(run), 42)
    found = state_of(run)
    assert (found.state, found.step, found.steps, found.attempt) == ("running", 42, 100, 0)
    assert found.img_per_s == pytest.approx(16.0)  # 8 images in the slower rank's 0.5 s
    assert found.peak_bytes == 2 << 28
    assert found.heartbeat_s < 30


def test_done_run_shows_its_record(run):
    begin(run)
    done(run)
    found = state_of(run)
    assert (found.state, found.step, found.img_per_s) == ("done", 100, 41.5)
    assert found.peak_bytes == 3 << 29
    end(begin(run, 1), "failed", cause="a disk was full")  # a repetition
    assert (state_of(run).state, state_of(run).attempt) == ("done", 0)


def test_failure_has_its_reason_and_where_it_came_to(run):
    folder = begin(run)
    steps(folder, 5)
    end(folder, "failed", reason="hang", cause="no progress: rank 1 sleeps")
    found = state_of(run)
    assert (found.state, found.reason, found.step) == ("failed", "hang", 5)
    assert found.cause == "no progress: rank 1 sleeps"


def test_process_that_is_gone_means_lost(run):
    begin(run, **dead_process())
    found = state_of(run)
    assert found.state == "lost"
    assert "is gone, and left no exit.json" in found.cause
    begin(run, 1, birth=1)  # another process has its number by now
    assert state_of(run).state == "lost"


def test_exit_record_written_during_status_query_is_used(run, monkeypatch):
    folder = begin(run, **dead_process())
    monkeypatch.setattr(state.time, "sleep", lambda _: end(folder, "cancelled"))
    assert state_of(run).state == "cancelled"


@pytest.mark.parametrize(("age_s", "expected"), [(5.0, "running"), (300.0, "lost")])
def test_ranks_elsewhere_are_judged_by_their_heartbeat(run, age_s, expected):
    folder = begin(run, **ELSEWHERE)
    for rank in range(2):
        beat(folder, rank, age_s)
    found = state_of(run)
    assert found.state == expected
    if expected == "lost":
        assert "no sign of life (on another-machine) for 300 s" in found.cause


def test_attempt_that_nobody_began_is_lost_after_a_while(run):
    (run / "a0").mkdir()
    (run / "a0" / "env.json").touch()
    assert state_of(run).state == "pending"
    os.utime(run / "a0" / "env.json", (1.0, 1.0))
    assert state_of(run).state == "lost"


def test_pending_job_shows_why_and_when(run):
    submitted(run, job="77", index=4)
    answer = JobStatus(interface.PENDING, "Priority", "2031-02-03T04:05:06")
    found = state_of(run, says(answer))
    assert (found.state, found.cause, found.job) == ("pending", "Priority", "77_4")
    assert found.expected == "2031-02-03T04:05:06"
    assert state_of(run, says(JobStatus(interface.RUNNING))).state == "running"
    silent = JobStatus(interface.UNKNOWN, "squeue is not installed here")  # is no verdict
    found = state_of(run, says(silent))
    assert (found.state, found.cause) == ("pending", "squeue is not installed here")


@pytest.mark.parametrize(
    ("word", "expected", "reason"),
    [
        ("TIMEOUT", "failed", "timeout"),
        ("NODE_FAIL", "failed", "node"),
        ("OUT_OF_MEMORY", "failed", "oom"),
        ("PREEMPTED", "failed", "preempted"),
        ("CANCELLED", "cancelled", None),
        ("COMPLETED", "lost", None),
    ],
)
def test_job_that_ended_without_exit_json(run, word, expected, reason):
    folder = submitted(run)
    begin(run, **ELSEWHERE)
    for rank in range(2):
        beat(folder, rank, 300.0)
    found = state_of(run, says(JobStatus(interface.ENDED, word)))
    assert (found.state, found.reason) == (expected, reason)


def test_cancelled_job_stays_cancelled_when_slurm_has_forgotten_it(run):
    """Without accounts Slurm forgets a job after minutes; a lost run would be submitted again."""
    folder = submitted(run)
    os.utime(folder / "job.json", (1.0, 1.0))
    assert state_of(run, says(JobStatus(interface.ENDED, "CANCELLED"))).state == "cancelled"
    found = state_of(run, says(JobStatus(interface.GONE)))
    assert (found.state, found.cause) == (
        "cancelled",
        "job 77 ended with CANCELLED, and left no exit.json",
    )


def test_exit_json_of_a_cancelled_job_are_not_written_over(run, monkeypatch):
    folder = submitted(run)
    values = {"cause": "stopped by SIGTERM", "exit_codes": {"0": -15}}
    monkeypatch.setattr(state.time, "sleep", lambda _: end(folder, "cancelled", **values))
    found = state_of(run, says(JobStatus(interface.ENDED, "CANCELLED")))
    assert (found.state, found.cause) == ("cancelled", "stopped by SIGTERM")
    assert json.loads((folder / "exit.json").read_text())["exit_codes"] == {"0": -15}


@pytest.mark.parametrize(
    "answer",
    [
        JobStatus(interface.GONE),
        JobStatus(interface.ENDED, "COMPLETED"),
        JobStatus(interface.ENDED, "FAILED"),
    ],
)
def test_attempt_that_was_to_be_cancelled_and_whose_job_is_gone_is_cancelled(run, answer):
    folder = submitted(run)
    os.utime(folder / "job.json", (1.0, 1.0))
    (folder / "cancel").touch()
    assert state_of(run, says(JobStatus(interface.RUNNING))).state == "running"
    assert state_of(run, says(answer)).state == "cancelled"
    assert json.loads((folder / "exit.json").read_text())["state"] == "cancelled"


def test_one_missing_answer_is_no_verdict(run):
    folder = submitted(run)
    os.utime(folder / "job.json", (1.0, 1.0))
    gone, waits = JobStatus(interface.GONE), JobStatus(interface.PENDING, "Resources")
    assert state_of(run, says(gone, waits)).state == "pending"
    assert state_of(run, says(gone, gone)).state == "lost"


def test_heartbeat_outweighs_a_scheduler_that_knows_nothing(run):
    submitted(run)
    begin(run, **ELSEWHERE)
    assert state_of(run, says(JobStatus(interface.GONE))).state == "running"


def test_job_that_was_queued_again_is_pending_though_its_attempt_ended(run):
    folder = submitted(run)
    end(folder, "failed", reason="preempted")
    found = state_of(run, says(JobStatus(interface.PENDING, "BeginTime")))
    assert (found.state, found.cause) == ("pending", "queued again after preempted (BeginTime)")
    assert state_of(run, says(JobStatus(interface.GONE))).reason == "preempted"


def test_run_that_waits_to_go_on_shows_the_step_that_is_saved(run):
    folder = submitted(run)
    steps(folder, 9)
    end(folder, "failed", reason="preempted")
    for name in ("step000004", "step000008", ".step000012.tmp"):
        (run / "checkpoints" / name).mkdir(parents=True)
    found = state_of(run, says(JobStatus(interface.PENDING, "BeginTime")))
    assert (found.state, found.step, found.steps) == ("pending", 8, 100)
    submitted(run, 1)
    begin(run, 1, **ELSEWHERE)
    found = state_of(run, says(JobStatus(interface.RUNNING)))
    assert (found.state, found.step) == ("running", 8)


def line(rank, number, step_s, loss=None):
    return {"kind": "step", "rank": rank, "step": number, "step_s": step_s, "loss": loss}


def test_step_is_over_when_every_rank_reported_it():
    progress = RunProgress(world=2, batch=6, steps=3)
    assert progress.feed({"kind": "ready", "rank": 0}) is None
    assert progress.feed(line(0, 0, 0.5)) is None
    assert progress.feed(line(0, 1, 0.5)) is None
    assert progress.feed(line(1, 0, 1.5, 2.0)) == FinishedStep(0, 1.5, 4.0, 2.0)
    assert progress.feed(line(1, 1, 0.25)) == FinishedStep(1, 0.5, 12.0, None)
    progress.feed(line(0, 2, 1.0, 1.0))
    over = progress.feed(line(1, 2, 1.0, 2.0))
    assert over.loss == 1.5  # the mean over replicas


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(), max_size=6), st.lists(st.integers(0, 60), max_size=8))
def test_tail_gives_every_line_once_however_the_file_grows(tmp_path_factory, texts, cuts):
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    seen = []
    for cut in [*sorted(cuts), len(data)]:
        path.write_bytes(data[:cut])
        seen += tail.read()
    assert seen == [{"text": text} for text in texts]
    assert tail.seen is bool(texts)
