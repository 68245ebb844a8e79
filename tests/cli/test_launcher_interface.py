"""A launcher is one registered class: a toy scheduler runs, lists and cancels runs through it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hires.cli.compose.choices import groups
from hires.core.config.launcher_config import LauncherConfig
from hires.core.errors import INTERRUPTED
from hires.core.store import launch_file
from hires.launcher import interface
from hires.launcher.interface import (
    ENDED,
    LAUNCHERS,
    RUNNING,
    JobStatus,
    Launcher,
    launcher_named,
    note_job,
)
from hires.launcher.job_wait import JobWait
from tests.helpers.commands import SMALL
from tests.helpers.patience import PATIENCE_S, until

_PROCESSES: dict[str, subprocess.Popen[bytes]] = {}


class ToyLauncher(Launcher):
    """Jobs are processes of this machine, and the number of a job is that of its process."""

    def submit(self, run, config, after=None):
        words = [
            sys.executable,
            __file__,
            str(run.path),
            str(run.attempt),
            "tests.helpers.fake_rank",
        ]
        process = subprocess.Popen(words, start_new_session=True)
        _PROCESSES[str(process.pid)] = process
        note_job("toy", run.attempt_dir, str(process.pid))
        return str(process.pid)

    def wait(self, run, job, on_line, args=()):
        return JobWait(self, run, job, on_line).wait()

    def job_states(self, jobs):
        codes = {job["job"]: _PROCESSES[job["job"]].poll() for job in jobs}
        words = {job: "COMPLETED" if code == 0 else "FAILED" for job, code in codes.items()}
        return {
            job: JobStatus(RUNNING) if code is None else JobStatus(ENDED, words[job])
            for job, code in codes.items()
        }

    def cancel(self, jobs):
        for job in jobs:
            os.kill(int(job["job"]), signal.SIGTERM)


@pytest.fixture
def toy(tmp_path, monkeypatch):
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
    assert f"job {job} was cancelled" in hires("cancel", "toys").out
    # before or after its handler
    assert _PROCESSES[job].wait(PATIENCE_S) in (INTERRUPTED, -signal.SIGTERM)
    assert "cancelled" in hires("status", "toys").out


def test_every_name_of_the_config_has_a_launcher():
    names = groups()["launcher"]
    assert {type(one) for one in interface.all_launchers()} == {LAUNCHERS[n] for n in names}
    assert all(launcher_named(n).has_jobs == LauncherConfig(n).has_jobs for n in names)


if __name__ == "__main__":
    from hires.launcher.local import __main__ as by_hand

    LAUNCHERS.register("toy")(ToyLauncher)
    sys.exit(by_hand.main(sys.argv[1:]))
