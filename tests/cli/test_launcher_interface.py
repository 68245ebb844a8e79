"""A launcher is one registered class: a toy scheduler runs, lists and cancels runs through it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from hires.cli.compose.choices import groups
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import INTERRUPTED, ConfigError
from hires.core.store import launch_file
from hires.core.store.rundir import RunDir
from hires.launcher import interface
from hires.launcher.interface import (
    ENDED,
    LAUNCHERS,
    RUNNING,
    Job,
    JobStatus,
    Launcher,
    OnLine,
    Outcome,
    launcher_named,
    note_job,
)
from hires.launcher.job_wait import JobWait
from tests.helpers.commands import SMALL
from tests.helpers.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
RANK = "tests.helpers.fake_rank"
_PROCESSES: dict[str, subprocess.Popen[bytes]] = {}


class ToyLauncher(Launcher):
    """Jobs are processes of this machine, and the number of a job is that of its process."""

    def submit(self, run: RunDir, config: RunConfig, after: str | None = None) -> str:
        words = [sys.executable, __file__, str(run.path), str(run.attempt), RANK]
        process = subprocess.Popen(words, start_new_session=True)
        _PROCESSES[str(process.pid)] = process
        note_job("toy", run.attempt_dir, str(process.pid))
        return str(process.pid)

    def wait(
        self, run: RunDir, job: str | None, on_line: OnLine | None, args: Sequence[str] = ()
    ) -> Outcome:
        assert job is not None
        return JobWait(self, run, job, on_line).wait()

    def job_states(self, jobs: Iterable[Job]) -> dict[str, JobStatus]:
        codes = {job["job"]: _PROCESSES[job["job"]].poll() for job in jobs}
        words = {job: "COMPLETED" if code == 0 else "FAILED" for job, code in codes.items()}
        return {
            job: JobStatus(RUNNING) if code is None else JobStatus(ENDED, words[job])
            for job, code in codes.items()
        }

    def cancel(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            os.kill(int(job["job"]), signal.SIGTERM)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Registers the launcher and writes its YAML; yields the words that choose it."""
    (tmp_path / "own" / "launcher").mkdir(parents=True)
    (tmp_path / "own" / "launcher" / "toy.yaml").write_text("# A toy\nname: toy\n")
    interface.all_launchers()
    template = launch_file._template
    own = {"toy.sh": "# Starts a toy: @COMMAND@\n"}
    monkeypatch.setattr(launch_file, "_template", lambda name: own.get(name) or template(name))
    monkeypatch.setitem(LAUNCHERS._items, "toy", ToyLauncher)
    yield ("--config-dir", str(tmp_path / "own"), "launcher=toy", "campaign=toys")
    for process in _PROCESSES.values():
        process.kill()
        process.wait()
    _PROCESSES.clear()


@pytest.mark.usefixtures("traced")
def test_registered_launcher_runs_lists_and_cancels(hires, toy, fake_ranks):
    done = hires("run", *SMALL, *toy, "--wait")
    assert done.code == 0, done.err
    assert "done" in hires("status", "toys").out

    fake_ranks({"0": "hang"})
    started = hires("run", *SMALL, *toy, "seed=1")
    assert "hires cancel" in started.out, started.err
    _, job = _PROCESSES  # the first one may still be on its way out: its record was written before
    until(lambda: "running" in hires("status", "toys").out)
    cancelled = hires("cancel", "toys")
    assert f"job {job} was cancelled" in cancelled.out
    # before or after its handler
    assert _PROCESSES[job].wait(PATIENCE_S) in (INTERRUPTED, -signal.SIGTERM)
    assert "cancelled" in hires("status", "toys").out


def test_every_name_of_the_config_has_a_launcher():
    names = groups()["launcher"]
    assert {type(one) for one in interface.all_launchers()} == {LAUNCHERS[n] for n in names}
    assert all(launcher_named(n).has_jobs == LauncherConfig(n).has_jobs for n in names)


def test_launcher_with_jobs_needs_a_script_that_starts_a_run_by_hand():
    with pytest.raises(ConfigError, match=r"launch/pbs\.sh is missing"):
        launch_file.launch_script(RunConfig(launcher=LauncherConfig(name="pbs")), ["hires"])


if __name__ == "__main__":
    from hires.launcher.local import __main__ as by_hand

    LAUNCHERS.register("toy")(ToyLauncher)
    sys.exit(by_hand.main(sys.argv[1:]))
