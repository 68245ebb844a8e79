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
from hires.core.store.ends import State
from hires.launcher import interface
from hires.launcher.interface import JobStatus
from hires.launcher.slurm import scheduler
from hires.launcher.status import state
from hires.launcher.status.run_progress import FinishedStep, LinesTail, RunProgress
from hires.launcher.status.state import states
from tests.helpers.run_folders import beat, begin, done, end, make_run, steps, submitted

CANCELLED = "ended with CANCELLED, and left no exit.json"
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


def test_running_run_shows_step_speed_and_memory_and_a_done_one_its_record(run):
    assert (state_of(run).state, state_of(run).attempt) == ("pending", None)
    steps(begin(run), 42)
    found = state_of(run)
    assert (found.state, found.step, found.steps, found.attempt) == ("running", 42, 100, 0)
    assert found.img_per_s == pytest.approx(16.0)  # 8 images in the slower rank's 0.5 s
    assert found.peak_bytes == 2 << 28
    assert found.heartbeat_s < 30
    done(run)
    found = state_of(run)
    assert (found.state, found.step, found.img_per_s) == ("done", 100, 41.5)
    assert found.peak_bytes == 3 << 29
    end(begin(run, 1), "failed", cause="a disk was full")  # a repetition
    assert (state_of(run).state, state_of(run).attempt) == ("done", 0)


def test_state_of_a_run_of_this_machine_is_read_without_writing(run):
    steps(begin(run), 2)
    folders = [run.parent, *(path for path in run.rglob("*") if path.is_dir())]
    for folder in folders:
        os.utime(folder, (1.0, 1.0))
    state.clock_ahead_s.cache_clear()
    assert state_of(run).state == "running"
    submitted(run, 1)
    assert state_of(run, says(WAITS)).state == "pending"
    os.utime(run, (1.0, 1.0))
    assert {folder.stat().st_mtime for folder in folders} == {1.0}


def test_process_that_is_gone_means_lost_unless_it_wrote_its_end_meanwhile(run, monkeypatch):
    folder = begin(run, **dead_process())
    found = state_of(run)
    assert found.state == "lost"
    assert "is gone, and left no exit.json" in found.cause
    begin(run, 1, birth=1)  # another process has its number by now
    assert state_of(run).state == "lost"
    folder = begin(run, 2, **dead_process())
    monkeypatch.setattr(state.time, "sleep", lambda _: end(folder, "cancelled"))
    assert state_of(run).state == "cancelled"


@pytest.mark.parametrize(("age_s", "expected"), [(5.0, "running"), (300.0, "lost")])
def test_ranks_elsewhere_are_judged_by_their_heartbeat(run, age_s, expected):
    folder = begin(run, **ELSEWHERE)
    for rank in range(2):
        beat(folder, rank, age_s)
    found = state_of(run)
    assert found.state == expected
    assert expected == "running" or "no sign of life (on another-machine) for 300" in found.cause
    submitted(run)  # a heartbeat outweighs a scheduler that knows nothing
    assert state_of(run, says(GONE)).state == expected


def test_attempt_that_nobody_began_is_lost_after_a_while(run):
    (run / "a0").mkdir()
    (run / "a0" / "env.json").touch()
    assert state_of(run).state == "pending"
    os.utime(run / "a0" / "env.json", (1.0, 1.0))
    assert state_of(run).state == "lost"


GONE = JobStatus(interface.GONE)
WAITS = JobStatus(State.PENDING, "Priority", "2031-02-03T04:05:06")
RUNS = JobStatus(State.RUNNING)
SILENT = JobStatus(interface.UNKNOWN, "squeue is not installed here")


WAITED = "was cancelled while it waited to go on"


def ended(word: str) -> JobStatus:
    return JobStatus(interface.ENDED, word)


@pytest.mark.parametrize(
    ("answers", "files", "expected", "reason", "cause"),
    [
        ((WAITS,), "", "pending", None, "Priority"),
        ((RUNS,), "", "running", None, None),
        ((SILENT,), "", "pending", None, "squeue is not installed here"),  # is no verdict
        ((GONE, WAITS), "", "pending", None, "Priority"),
        ((GONE, GONE), "", "lost", None, None),
        # The end of a job whose supervisor left none.
        ((ended("TIMEOUT"),), "", "failed", "timeout", None),
        ((ended("COMPLETED"),), "", "lost", None, None),
        ((ended("CANCELLED"),), "", "cancelled", None, f"job 77_4 {CANCELLED}"),
        # A request of hires cancel counts as soon as the job has ended in any way.
        ((RUNS,), "cancel", "running", None, None),
        ((GONE,), "cancel", "cancelled", None, None),
        ((ended("COMPLETED"),), "cancel", "cancelled", None, None),
        # A job that is queued again waits, though its attempt has ended.
        ((WAITS,), "exit.json", "pending", None, "queued again after preempted (Priority)"),
        ((GONE,), "exit.json", "failed", "preempted", None),
        ((ended("CANCELLED"),), "exit.json", "cancelled", None, f"job 77_4 {WAITED}"),
    ],
)
def test_job_is_in_the_state_that_slurm_and_its_files_show(
    run, answers, files, expected, reason, cause
):
    folder = submitted(run, job="77", index=4)
    os.utime(folder / "job.json", (1.0, 1.0))
    if files == "cancel":
        (folder / "cancel").touch()
    elif files:
        end(folder, "failed", reason="preempted")
    found = state_of(run, says(*answers))
    assert (found.state, found.reason) == (expected, reason)
    assert cause is None or found.cause == cause
    if expected == "pending" and WAITS in answers:
        assert (found.job, found.expected) == ("77_4", WAITS.expected)
    assert (folder / "exit.json").exists() is (files == "exit.json"), "a query writes nothing"
    if (
        expected == "cancelled" and files == "cancel"
    ):  # and stays so when Slurm, without accounts, has forgotten it
        assert state_of(run, says(GONE)).state == expected


def test_job_that_failed_before_its_run_began_is_a_failed_launch(run):
    submitted(run)
    found = state_of(run, says(ended("FAILED")))
    assert (found.reason, f"does not see {run}" in found.cause) == ("launch", True)
    begin(run)
    found = state_of(run, says(ended("FAILED")))
    assert (found.reason, f"does not see {run}" in found.cause) == (None, False)


def test_run_that_waits_to_go_on_shows_the_step_that_is_saved(run):
    folder = submitted(run)
    steps(folder, 9)
    end(folder, "failed", reason="preempted")
    for name in ("step000004", "step000008", ".step000012.tmp"):
        (run / "checkpoints" / name).mkdir(parents=True)
    found = state_of(run, says(WAITS))
    assert (found.state, found.step, found.steps) == ("pending", 8, 100)
    submitted(run, 1)
    begin(run, 1, **ELSEWHERE)
    found = state_of(run, says(RUNS))
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


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(), max_size=6), st.lists(st.integers(0, 60), max_size=8))
def test_tail_gives_every_line_once_however_the_file_grows(tmp_path_factory, texts, cuts):
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    tail = LinesTail(path.parent, path.name)
    assert tail.read() == []
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    seen = []
    for cut in [*sorted(cuts), len(data)]:
        path.write_bytes(data[:cut])
        seen += tail.read()
    assert seen == [{"text": text} for text in texts]
    assert tail.seen is bool(texts)
