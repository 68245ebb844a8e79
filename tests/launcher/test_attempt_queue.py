"""Many runs share a machine: none is lost, none runs twice at once, none is left behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os

import pytest

from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import MeasureConfig
from hires.core.errors import RunError
from hires.core.store import attempts, records, rundir
from hires.core.store.ends import End
from hires.core.store.reading import read_rank_lines
from hires.launcher.attempt_queue import LocalQueue
from hires.launcher.interface import FrozenRun, Share
from tests.helpers.launches import ROOT, alive
from tests.helpers.new_runs import complete
from tests.helpers.run_folders import begin, end


class Watcher:
    """Counts what runs at the same time."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.most = 0
        self.order: list[str] = []
        self.lines = 0
        self.out: list[tuple] = []

    def started(self, task, attempt):
        assert task.path.name not in self.running
        self.running.append(task.path.name)
        self.order.append(task.argv[-1])
        self.most = max(self.most, len(self.running))

    def line(self, task, line):
        self.lines += 1

    def left(self, task, why):
        self.out.append((task, why))

    def ended(self, end):
        if end.attempt is not None:
            self.running.remove(end.task.path.name)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Returns a function that freezes a run and returns its task."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def frozen(seed, ranks=1, threads=1, memory_bytes=0):
        config = RunConfig(
            seed=seed, steps=3, results=str(tmp_path / "results"), measure=MeasureConfig(warmup=1),
            parallel=ParallelConfig(replicas=ranks), launcher=LauncherConfig(threads=threads),
        )  # fmt: skip
        argv = ("hires", "run", f"seed={seed}")
        path = rundir.freeze(config, {"world": ranks, "totals": {}}, argv)
        return FrozenRun(path, argv, config, needs_bytes=memory_bytes)

    return frozen


def behave(monkeypatch, *behaviours):
    told = {str(rank): behaviour for rank, behaviour in enumerate(behaviours)}
    monkeypatch.setenv("HIRES_FAKE_RANKS", json.dumps(told))


def run(tasks, watcher=None, **rooms):
    rooms = Share(**{"cores": 4, "memory_bytes": math.inf, **rooms})
    queue = LocalQueue(tasks, rooms, watcher or Watcher(), "tests.helpers.fake_rank")
    queue.work()
    events = [
        event
        for task in tasks
        for folder in task.path.glob("a*")
        for event in read_rank_lines(folder, "events.jsonl")
    ]
    pids = [
        event["pid"] for event in events if event["event"] in ("rank_started", "launch_started")
    ]
    assert not alive(pid for pid in pids if pid != os.getpid())
    return queue


def states(result):
    return [(end.attempt, end.state) for end in result.ends]


def test_repeats_run_one_after_the_other_and_each_keeps_its_record(make):
    task, other, watcher = make(0), make(3), Watcher()
    result = run([task, task, other], watcher, attempts=3)  # the watcher sees no run twice at once
    assert sorted(states(result)) == [(0, "done"), (0, "done"), (1, "done")]
    assert (result.waiting, result.interrupts.received) == ([], [])
    assert watcher.order == ["seed=0", "seed=3", "seed=0"]
    assert (watcher.most, watcher.lines) == (2, 3 * 6)
    kept = [records.read_record(task.path / f"a{attempt}") for attempt in range(2)]
    assert [record["attempt"] for record in kept] == [0, 1]
    assert kept[0]["reproduce"] == "hires run seed=0"
    assert rundir.done_attempts(task.path) == [0, 1]
    watcher = Watcher()  # those that another command made since count once
    assert states(run([task] * 3, watcher)) == [(2, "done")]
    assert len(watcher.out) == 2


@pytest.mark.parametrize(
    ("facts", "limits", "most"),
    [
        ({}, {"attempts": 1}, 1),
        ({"ranks": 2}, {"attempts": 3, "cores": 3}, 1),
        ({"threads": 2}, {"attempts": 3, "cores": 4}, 2),  # an exact fit
        ({"threads": 2}, {"attempts": 3, "cores": 3}, 1),
        ({"memory_bytes": 600}, {"attempts": 3, "memory_bytes": 100}, 1),
    ],
)
def test_as_many_run_at_once_as_cores_and_memory_allow(make, facts, limits, most):
    watcher = Watcher()
    result = run([make(seed, **facts) for seed in range(2)], watcher, **limits)
    assert [end.state for end in result.ends] == ["done"] * 2
    assert watcher.most == most


def test_failed_run_stops_no_other(make, monkeypatch):
    tasks = [make(seed) for seed in range(3)]
    behave(monkeypatch, f"picky {tasks[1].path.name}")
    result = run(tasks)
    assert states(result) == [(0, "done"), (0, "failed"), (0, "done")]
    assert "exited with code 1" in result.ends[1].end.cause


def test_attempt_whose_end_could_not_be_written_does_not_hold_up_the_next(make, monkeypatch):
    behave(monkeypatch, "exit 3")
    task, watcher, write, calls = make(0), Watcher(), End.write, []

    def writes(end, run, attempt):
        calls.append(attempt)
        if len(calls) == 1:
            raise RunError("the disk is full")
        write(end, run, attempt)

    monkeypatch.setattr(End, "write", writes)
    assert states(run([task, task], watcher)) == [(0, "failed"), (1, "failed")]
    assert (watcher.out, calls) == ([], [0, 0, 1])  # the second closes the first


def test_interrupt_stops_what_runs_and_leaves_the_rest_pending(make, monkeypatch):
    behave(monkeypatch, f"interrupt {os.getpid()}")
    tasks = [make(seed) for seed in range(3)]
    result = run(tasks)
    assert states(result) == [(0, "cancelled")]
    assert result.interrupts.received
    assert result.stopped == "stopped by Ctrl-C"
    assert result.waiting == tasks[1:]
    assert not list(tasks[1].path.glob("a*"))


def test_run_that_is_under_way_elsewhere_or_complete_by_now_is_left(make):
    tasks = [make(seed) for seed in range(4)]
    # Another machine shares the results: its process cannot be seen, its heartbeat can.
    begin(tasks[0].path, host="another", boot="1", space="pid:[1]", pid=7)
    attempts.next_attempt(tasks[1].path)  # another command is just starting it
    complete(rundir.RunDir(tasks[2].path, attempts.next_attempt(tasks[2].path)))
    end(tasks[2].path / "a0", "done")
    watcher = Watcher()
    queue = LocalQueue(tasks, Share(), watcher, "tests.helpers.fake_rank")
    queue.work()
    assert states(queue) == [(0, "done")]
    why = {task.argv[-1]: text for task, text in watcher.out}
    assert "process 7 on another runs attempt a0" in why["seed=0"]
    assert "a0 was just made" in why["seed=1"]
    assert why["seed=2"] == "completed by another command meanwhile"
    assert not [task for task in tasks if (task.path / "a1").exists()]


def test_gpu_belongs_to_one_run_at_a_time(make):
    seen = {}

    class Sight(Watcher):
        def started(self, task, attempt):
            super().started(task, attempt)
            seen[task.argv[-1]] = {run.task.argv[-1]: list(run.gpus) for run in queue.running}

    counts = enumerate((1, 2, 1, 0, 3))
    tasks = [dataclasses.replace(make(seed), gpus=gpus) for seed, gpus in counts]
    queue = LocalQueue(
        tasks, Share(4, 8, math.inf), Sight(), "tests.helpers.fake_rank", gpus=["4", "7"]
    )
    queue.work()
    assert [end.state for end in queue.ends] == ["done"] * 5
    assert seen["seed=2"] == {"seed=0": ["4"], "seed=2": ["7"]}  # the second would need both
    assert seen["seed=3"]["seed=3"] == []  # it computes on the CPU
    assert seen["seed=1"]["seed=1"] == ["4", "7"]
    assert "seed=1" not in seen["seed=4"]
    assert seen["seed=4"]["seed=4"] == ["4", "7"]  # alone, a run takes all that there are
