"""A rank shows that it lives, says when it is stuck, and writes its status when it is asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hires.core.errors import RunError
from hires.core.ranks import heartbeat
from hires.core.ranks.heartbeat import Activity
from hires.core.ranks.timeline import FORWARD, Recorder
from hires.core.store import provenance, records
from hires.core.store.attempts import Attempt
from tests.helpers.launches import ROOT
from tests.helpers.patience import until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "a0" / "logs").mkdir(parents=True)
    return tmp_path


def stuck(run: Path) -> list[dict]:
    return [e for e in Attempt(run, 0).events if e["event"] == "rank_stuck"]


def test_heart_beats_while_the_block_runs(run, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    with heartbeat.beat(run, 0, 3, Activity(), timeout_s=0.2):
        file = heartbeat.alive_file(run / "a0", 3)
        assert file.stat().st_size == 0
        os.utime(file, (1.0, 1.0))
        until(lambda: heartbeat.heartbeats(run / "a0")[3] > 1.0)
    os.utime(file, (1.0, 1.0))
    time.sleep(0.2)
    assert heartbeat.heartbeats(run / "a0") == {3: 1.0}
    assert not list((run / "a0" / "logs").iterdir())  # nobody asked for stacks
    assert stuck(run) == []


class Clock:
    """The time of a process, which passes only when it is told."""

    def __init__(self) -> None:
        self.now_s, self.cpu_s = 100.0, 1.0

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.cpu_s


@pytest.fixture
def spend(run, monkeypatch):
    """Returns a function that passes time, asleep or not, while a rank's heartbeat looks at it."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    looking = {}

    def spend(activity: Activity, seconds: float, *, computing: bool = False) -> None:
        found = looking.setdefault(
            activity, heartbeat.HeartbeatThread(run, 0, 0, activity, timeout_s=2.0)
        )
        for _ in range(round(seconds / 0.5)):
            clock.now_s += 0.5
            clock.cpu_s += 0.5 * computing
            found._look()

    return spend


def in_step() -> Activity:
    activity = Activity()
    activity.recorder = Recorder()
    activity.recorder.begin_step()
    return activity


def test_rank_that_sleeps_in_an_action_says_so_and_one_that_computes_does_not(run, spend):
    activity = in_step()
    with activity.recorder.span(FORWARD, "F0"):
        spend(activity, 60.0, computing=True)
        spend(activity, 1.5)
        assert stuck(run) == []
        spend(activity, 60.0)
    [said] = stuck(run)
    assert said["action"] == "F0"


def test_rank_that_prepares_may_be_idle_for_longer_but_not_for_ever(run, spend):
    """A rank that opened its data on a dead file server was never stuck."""
    activity = Activity()
    spend(activity, 25.0)
    spend(activity, 600.0, computing=True)
    spend(activity, 29.0)
    assert stuck(run) == []
    spend(activity, 3.0)
    assert len(stuck(run)) == 1


def test_rank_that_computes_while_it_waits_is_stuck(run, spend):
    activity = in_step()
    activity.begin("a receive from rank 1", 1, 7)
    spend(activity, 60.0, computing=True)
    [event] = stuck(run)
    assert (event["rank"], event["what"]) == (0, "a receive from rank 1")
    assert event["since_s"] >= 2.0


def test_rank_at_a_large_file_may_take_longer_and_has_the_usual_time_afterwards(run, spend):
    activity = in_step()
    with activity.may_stand_still(60.0):
        spend(activity, 50.0)
    spend(activity, 2.0)
    assert stuck(run) == []
    spend(activity, 60.0)
    [said] = stuck(run)
    assert said["since_s"] == 2.0
    other = in_step()
    with other.may_stand_still(60.0):
        spend(other, 70.0)  # but not for ever
    assert len(stuck(run)) == 2


def test_status_and_stacks_are_written_on_request(run):
    activity = Activity()
    with heartbeat.beat(run, 0, 2, activity, timeout_s=0.4):
        activity.end(activity.begin("a send to rank 1", 1, 5))
        activity.begin("an all-gather among ranks [1, 2]", ranks=(1, 2))
        heartbeat.request_status(run / "a0")
        answer = heartbeat.status_file(run / "a0", 2)
        until(answer.exists)
    told = json.loads(answer.read_text())
    assert (told["rank"], told["what"]) == (2, "an all-gather among ranks [1, 2]")
    assert "test_heartbeat.py" in heartbeat.stacks_file(run / "a0", 2).read_text()


RANK = """
import sys, time
from hires.core.ranks import heartbeat
from hires.core.ranks.heartbeat import Activity
with heartbeat.beat(sys.argv[1], 0, 0, Activity(), 60.0):
    print("beats", flush=True)
    sys.setswitchinterval(float(sys.argv[2]))
    sleep_s = float(sys.argv[3])
    while not sleep_s:
        pass  # as C code that does not let go of the interpreter
    time.sleep(sleep_s)
"""


@contextlib.contextmanager
def rank_of(run: Path, switch_s: float, sleep_s: float):
    """Yields the process of a rank that beats."""
    command = [sys.executable, "-c", RANK, str(run), str(switch_s), str(sleep_s)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as rank:
        try:
            rank.stdout.readline()
            yield rank
        finally:
            rank.kill()


def test_rank_whose_attempt_was_ended_without_it_ends(run):
    with rank_of(run, 0.005, 500.0) as rank:
        (run / "a0" / "exit.json").write_text("{}")
        assert rank.wait(60) == -signal.SIGTERM


def test_rank_whose_launcher_has_ended_does_not_begin(run):
    """A rank of torchrun that started late did not see that its parent had ended, and ran on.

    In a sweep the launcher's process is alive after the attempt has ended.
    """
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    records.event(run, 0, "launch_started", **{**provenance.myself(), "pid": gone.pid})
    for _ in range(2):
        late = heartbeat.beat(run, 0, 0, Activity(), 1.0)
        with pytest.raises(RunError, match="has ended before this rank began"), late:
            pass
        records.event(run, 0, "launch_started", **provenance.myself())
        (run / "a0" / "exit.json").write_text("{}")


def test_signal_brings_the_stacks_of_a_rank_that_lets_no_thread_run(run):
    with rank_of(run, 1e6, 0.0) as rank:
        rank.send_signal(signal.SIGUSR1)
        until(lambda: "<string>" in heartbeat.stacks_file(run / "a0", 0).read_text())
        assert rank.poll() is None
