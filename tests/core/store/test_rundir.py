"""Run folders and attempts are whole and distinct, whoever makes them at once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hires.core.config.launcher_config import LauncherConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store import attempts, campaign, files, naming, records, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.campaign import Campaign, ExcludedPoint, PlannedPoint
from hires.core.store.ends import End
from tests.helpers.launches import ROOT
from tests.helpers.new_runs import ARGV, PLAN, complete, leftovers
from tests.helpers.patience import PATIENCE_S


def test_new_run_is_frozen_whole(config):
    run = rundir.create(config, PLAN, ARGV)
    assert run.attempt == 0
    assert run.path.parent == Path(config.results) / "default"
    assert run.name.startswith("resnet50-224x224-single-fp32-")
    assert records.read_config(run) == config
    assert records.read_plan(run) == PLAN
    assert os.access(run.path / "launch.sh", os.X_OK)
    env = json.loads((run.attempt_dir / "env.json").read_text())
    assert env["argv"] == ARGV
    assert env["reproduce"] == "hires run parallel=sp"
    assert env["provenance"]["hardware"]["cores"] >= 1
    assert (run.attempt_dir / "logs").is_dir()
    assert not leftovers(Path(config.results))


def test_incomplete_run_gets_its_next_attempt(config):
    run = rundir.create(config, PLAN, ARGV)
    for number, record in enumerate(("", '{"state": "failed", "attempt": 0}', '{"state": "do')):
        (run.path / "record.json").write_text(record)
        assert rundir.create(config, PLAN, ARGV) == replace(run, attempt=number + 1)
    assert rundir.open_run(run.path).attempt == 3
    complete(run)  # one that is complete, and is wanted again, too
    assert rundir.open_run(run.path) == run
    assert rundir.create(config, PLAN, ARGV).attempt == 4


def test_what_killed_commands_left_goes_with_the_next_attempt(config):
    run = rundir.create(config, PLAN, ARGV)
    left = [run.path / ".record.json.77-0a.tmp", run.attempt_dir / ".exit.json.77-0b.tmp"]
    under_way = run.path / ".plan.json.78-0c.tmp"
    for path in (*left, under_way):
        path.write_text("{")
    for path in left:
        os.utime(path, (0, 0))
    rundir.create(config, PLAN, ARGV)
    assert [path.exists() for path in (*left, under_way)] == [False, False, True]


def test_changed_plan_replaces_the_frozen_one_which_stays_with_its_attempt(config):
    run = rundir.create(config, PLAN, ARGV)
    newer = {**PLAN, "verdict": "deadlock-free, 3 messages"}
    assert rundir.create(config, newer, ARGV).attempt == 1
    assert records.read_plan(run) == newer
    assert json.loads((run.path / "a0/plan.json").read_text()) == PLAN
    assert not (run.path / "a0/config.yaml").exists()
    assert rundir.create(config, PLAN, ARGV).attempt == 2
    assert json.loads((run.path / "a1/plan.json").read_text()) == newer
    for port in (29500, 29501):  # the first one is no edit for the second
        rundir.refreeze(run.path, replace(config, launcher=LauncherConfig(port=port)))
    assert records.read_config(run).launcher.port == 29501


def test_edited_config_is_not_run_as_something_else(config):
    run = rundir.create(config, PLAN, ARGV)
    file = run.path / "config.yaml"
    complete(run)
    for text in (file.read_text().replace("batch: 8", "batch: 16"), "", "["):
        file.write_text(text)
        with pytest.raises(RunError, match="was edited or damaged"):
            rundir.create(config, PLAN, ARGV)


def test_attempts_taken_at_once_are_distinct(config, monkeypatch):
    run = rundir.create(config, PLAN, ARGV)
    monkeypatch.setattr(attempts, "last_number", lambda path: 0)  # all look before any takes one
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda _: attempts.next_attempt(run.path), range(8)))
    assert sorted(numbers) == list(range(1, 9))


def test_frozen_run_is_pending_until_its_first_attempt(config):
    path = rundir.freeze(config, PLAN, ARGV)
    assert rundir.frozen_folder(path) == path
    assert rundir.done_attempts(path) == []
    assert not list(path.glob("a*"))
    with pytest.raises(RunError, match="is pending: no attempt has started"):
        rundir.open_run(path)
    newer = {**PLAN, "verdict": "deadlock-free, 3 messages"}
    assert rundir.freeze(config, newer, ARGV) == path
    assert records.read_plan(path) == newer
    assert attempts.next_attempt(path, ARGV) == 0
    run = rundir.open_run(path)
    assert (run.path, run.attempt) == (path, 0)
    assert json.loads((run.attempt_dir / "env.json").read_text())["reproduce"] == (
        "hires run parallel=sp"
    )
    assert rundir.create(config, PLAN, ARGV).attempt == 1


def test_done_attempts_are_those_that_ended_well(config):
    run = rundir.create(config, PLAN, ARGV)
    for state in ("failed", "done", "cancelled", "done"):
        folder = run.path / f"a{attempts.next_attempt(run.path, ARGV)}"
        (folder / "exit.json").write_text(json.dumps({"state": state}))
    (run.attempt_dir / "exit.json").write_text("{")
    assert rundir.done_attempts(run.path) == [2, 4]
    complete(run)  # by its record, whose exit.json is damaged
    assert rundir.done_attempts(run.path) == [0, 2, 4]


def test_find_by_path_name_campaign_and_hash(config):
    run = rundir.create(config, PLAN, ARGV)
    names = (str(run.path), run.name, f"default/{run.name}", run.name[-8:], run.name[-8:-3])
    for name in names:
        assert rundir.open_run(rundir.locate(name, config.results)) == run
    for name in ("nothing", ""):
        with pytest.raises(ConfigError, match=f"'{name}' is no campaign and no run"):
            rundir.locate(name, config.results)
    (run.path / "config.yaml").unlink()
    assert rundir.of_campaign(run.path.parent) == [run.path]


CREATE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from hires.core.store import rundir
from hires.core.config.run_config import RunConfig
def create(seed):
    return rundir.create(RunConfig(results=sys.argv[1], seed=seed), {"world": 1}, [])
seeds = [0] * 8 + list(range(1, 9))
with ThreadPoolExecutor(8) as pool:
    for run in pool.map(create, seeds):
        print(run.path, run.attempt)
"""


def test_sixty_creations_at_once(tmp_path):
    """Equal configs share one folder and never an attempt; distinct ones never share a folder."""
    command = [sys.executable, "-c", CREATE, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    makers = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in "1234"
    ]
    lines = [
        line for maker in makers for line in maker.communicate(timeout=PATIENCE_S)[0].splitlines()
    ]
    assert [maker.returncode for maker in makers] == [0] * 4
    assert len(lines) == len(set(lines)) == 64
    folders = sorted((tmp_path / "default").iterdir())
    attempts = sorted(len(list(folder.glob("a*"))) for folder in folders)
    assert attempts == [4] * 8 + [32]
    assert all((folder / "plan.json").read_text() for folder in folders)
    assert not leftovers(tmp_path)


def test_readers_never_see_half_a_folder(config):
    path = Path(config.results) / "default" / naming.run_name(config)
    wanted = {"config.yaml", "plan.json", "launch.sh", "frozen.json", "planned.json"}
    seen, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            with contextlib.suppress(FileNotFoundError):  # it comes and goes
                seen.append({entry.name for entry in path.iterdir()})

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(10):
        rundir.create(config, PLAN, ARGV)
        # Moved, not deleted: a reader that has opened it would see it shrink.
        path.rename(path.with_name(f"old{number}"))
    stop.set()
    thread.join()
    assert all(names - {"a0"} == wanted for names in seen)


@pytest.fixture
def full_disk(monkeypatch):
    """Lets every write to disk fail as on a full one."""

    def fail(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", fail)


def test_full_disk_leaves_nothing(config, full_disk, monkeypatch):
    with pytest.raises(
        RunError, match=r"cannot write .*: No space left on device; free some space"
    ):
        rundir.create(config, PLAN, ARGV)
    assert not list((Path(config.results) / "default").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda fd: None)
        run = rundir.create(config, PLAN, ARGV)
    with pytest.raises(RunError, match="No space left"):
        rundir.create(config, PLAN, ARGV)
    assert [p.name for p in run.path.glob("a*")] == ["a0"]
    assert not leftovers(run.path)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "a0").mkdir()
    return tmp_path


def test_the_last_start_counts(run):
    lines = [{"event": "launch_started", "pid": 1}, {"event": "other"}]
    lines += [{"event": "launch_started", "pid": 2}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "a0" / "events.jsonl").write_text(text + '{"event": "launch_started", "pid"')
    assert Attempt(run, 0).launched["pid"] == 2


def test_later_sweep_adds_and_replaces_and_is_read_back(tmp_path):
    sweeps = Campaign(tmp_path.name)
    words = ["data.path='it\\'s $(x);\n'", "image=1"]
    sweeps.add({}, [PlannedPoint("a-1", words)], [ExcludedPoint(["image=2"], "too large")])
    sweeps.add({}, [PlannedPoint("a-1", words, 3), PlannedPoint("b-2", ["image=2"])], [])
    for reason in ("too large", "no memory"):
        sweeps.add({"argv": ["hires"]}, [], [ExcludedPoint(["image=3"], reason)])
    assert sweeps.points == [PlannedPoint("a-1", words, 3), PlannedPoint("b-2", ["image=2"])]
    assert sweeps.excluded == [ExcludedPoint(["image=3"], "no memory", "infeasible")]
    assert len(sweeps.sweeps) == 4
    campaign.write(tmp_path, sweeps)
    assert campaign.read(tmp_path) == sweeps
    assert [path.name for path in tmp_path.iterdir()] == ["campaign.json"]


def test_cancelled_attempt_keeps_the_cause_of_its_earlier_end(config):
    run = rundir.create(config, PLAN, ARGV)
    early = End("failed", "it made way", "preempted", {10: 75, 2: 75})
    early.write(run.path, 0)
    before = Attempt(run.path, 0).exit
    assert before == replace(early, ended=before.ended)
    before.cancelled("cancelled while it waited").write(run.path, 0)
    text = "cancelled while it waited; before that: it made way"
    assert Attempt(run.path, 0).exit == replace(before, state="cancelled", cause=text, reason=None)
