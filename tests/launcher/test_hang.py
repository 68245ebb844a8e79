"""A world that does not move is found, explained on one page, and stopped: real ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hires.core.config.checkpoint_config import CheckpointConfig
from hires.core.config.comm_config import CommConfig
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.model_config import ModelConfig
from hires.core.config.optimizer_config import OptimizerConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import MeasureConfig, RunConfig
from hires.core.store import records, rundir
from hires.core.store.reading import read_lines
from hires.core.store.rundir import RunDir
from hires.launcher.local import local_launcher
from hires.launcher.supervision import watchdog
from tests.helpers.traces import plan_of
from tests.launcher.conftest import ROOT, alive, events, rank_pids

pytestmark = pytest.mark.dist

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun.openmpi") is None, reason="there is no Open MPI; make test-mpi installs it"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RunDir:
    """A run of two tiles whose ranks give up after three seconds without progress."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = RunConfig(
        image=[37, 33],
        batch=2,
        steps=100_000,
        model=ModelConfig("preact_resnet", n=1, classes=10),
        parallel=ParallelConfig(name="sp", tiles=[2, 1]),
        comm=CommConfig(timeout_s=3.0),
        measure=MeasureConfig(warmup=1),
        optimizer=OptimizerConfig(lr=0.0),
        launcher=LauncherConfig(name=getattr(request, "param", "local")),
        results=str(tmp_path / "results"),
    )
    plan = plan_of(config)
    return rundir.create(config, plan.to_dict(), ["hires", "run", "parallel=sp"])


def exit_json(run: RunDir) -> dict:
    return json.loads((run.attempt_dir / "exit.json").read_text())


def page_of(run: RunDir) -> str:
    return (run.attempt_dir / "hang.txt").read_text()


def stop_rank_1(run: RunDir) -> None:
    """Stops the process of rank 1 after its third step."""

    def stop():
        while not any(
            line["kind"] == "step" and line["step"] > 2
            for line in read_lines(run.attempt_dir / "metrics.jsonl")
        ):
            time.sleep(0.05)
        [pid] = [line["pid"] for line in events(run, "rank_started") if line["rank"] == 1]
        os.kill(pid, signal.SIGSTOP)

    threading.Thread(target=stop, daemon=True).start()


@pytest.mark.slow
def test_stopped_rank_is_named_with_the_message_that_is_missing(run):
    stop_rank_1(run)
    outcome = local_launcher.launch(run, run.attempt)
    assert (outcome.state, outcome.reason, outcome.failed_rank) == ("failed", "hang", 1)
    assert "rank 1 does not answer: its process is stopped (by SIGSTOP" in outcome.cause
    assert "comm.timeout_s=3 s" in outcome.cause
    assert exit_json(run)["reason"] == "hang"
    assert exit_json(run)["cause"] == outcome.cause == records.read_record(run)["cause"]
    page = page_of(run)
    assert page.startswith("no progress: rank 1 does not answer")
    assert "rank 0 waits for" in page
    assert "where every rank stands" in page
    assert "hires/comm/" in page.split("Python stacks")[1]
    assert not alive(rank_pids(run))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "run",
    ["torchrun", pytest.param("mpirun", marks=[pytest.mark.mpi, needs_mpirun])],
    indirect=True,
)
def test_stopped_rank_that_one_command_started_is_named_too(run):
    stop_rank_1(run)
    outcome = local_launcher.launch(run, run.attempt)
    assert (outcome.state, outcome.reason, outcome.failed_rank) == ("failed", "hang", 1)
    assert "rank 1 does not answer: its process is stopped (by SIGSTOP" in outcome.cause
    assert "Python stacks" in page_of(run)
    assert not alive(rank_pids(run))


@pytest.mark.slow
def test_rank_that_sleeps_in_a_hook_is_found_with_the_line_where_it_sleeps(run, monkeypatch):
    monkeypatch.setenv("SLEEPY", "0")
    outcome = local_launcher.launch(run, run.attempt, module="tests.helpers.sleepy_rank")
    assert (outcome.state, outcome.reason, outcome.failed_rank) == ("failed", "hang", 0)
    page = page_of(run)
    assert "rank 0 is in B0 of step 2 and waits for no rank" in page
    assert "sleepy_rank.py" in page.split("Python stacks")[1]
    assert "in doze" in page
    assert "rank 1 waits for" in page
    assert not alive(rank_pids(run))


@pytest.mark.slow
def test_one_rank_that_sleeps_alone_is_found_too(run, monkeypatch, tmp_path):
    monkeypatch.setenv("SLEEPY", "0")
    config = replace(records.read_config(run), parallel=ParallelConfig(), campaign="alone")
    plan = plan_of(config)
    alone = rundir.create(config, plan.to_dict(), ["hires", "run"])
    outcome = local_launcher.launch(alone, 0, module="tests.helpers.sleepy_rank")
    assert outcome.reason == "hang"
    assert events(alone, "rank_stuck")[0]["action"] == "B0"


@pytest.mark.slow
def test_save_that_takes_longer_than_the_timeout_is_no_hang(run, monkeypatch):
    monkeypatch.setenv("SLOW_S", "5")
    config = records.read_config(run)
    config = replace(
        config, steps=3, checkpoint=CheckpointConfig(every=2, at_end="never"), campaign="slow"
    )
    slow = rundir.create(config, records.read_plan(run), ["hires", "run"])
    outcome = local_launcher.launch(slow, 0, module="tests.helpers.slow_saver")
    assert (outcome.state, outcome.cause) == ("done", None)
    [saved] = events(slow, "checkpoint_saved")
    assert saved["save_s"] > config.comm.timeout_s
    assert not events(slow, "rank_stuck")


def test_silent_heart_is_noticed_by_the_watchers_own_clock(tmp_path, monkeypatch):
    (tmp_path / "alive").mkdir()
    beat = tmp_path / "alive" / "rank0000"
    beat.touch()
    os.utime(beat, (1.0, 1.0))  # as after a laptop has slept, or on another machine's clock
    clock = iter(float(second) for second in range(0, 100, 10))
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    dog = watchdog.Watchdog(tmp_path, timeout_s=15.0)
    assert [dog.look() for _ in range(3)] == [False, False, False]
    os.utime(beat, (2.0, 2.0))
    assert [dog.look() for _ in range(4)] == [False, False, False, True]
    assert not dog.look({0})  # it has ended well
