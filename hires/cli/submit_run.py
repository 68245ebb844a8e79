"""Submits the run of ``hires run`` to a scheduler, and waits for its job."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from hires.cli.screens.progress_bar import StepProgress
from hires.core.config.run_config import RunConfig
from hires.core.store.rundir import RunDir
from hires.launcher.interface import Launcher, Outcome, launcher_of


def waits_for(config: RunConfig, args: argparse.Namespace) -> str | None:
    """Returns what jobs wait for, in the scheduler's words; None: for nothing.

    Args:
        config: of a run.
        args: of the command line, with ``--after`` and ``--after-any``.

    Raises:
        ConfigError: the launcher has no jobs, or a name is unknown.
    """
    return launcher_of(config).dependency(args.after, args.after_any, config.results)


def tell(launcher: Launcher, run: RunDir, job: str, as_json: bool) -> None:
    """Prints which job a run is, and how it is watched and stopped."""
    if as_json:
        print(json.dumps({"run": str(run.path), "attempt": run.attempt, "job": job}, indent=2))
        return
    print(f"job {job} is attempt {run.attempt} of {run.path}")
    path = shlex.quote(str(run.path))
    hints = launcher.hints(run, job)
    hints += [("its tables:", f"hires show {path}"), ("to stop it:", f"hires cancel {path}")]
    for what, command in hints:
        print(f"  {what:<16}{command}")


def waited(launcher: Launcher, config: RunConfig, run: RunDir, job: str, world: int) -> Outcome:
    """Returns how a job ended; shows the steps meanwhile.

    Ctrl-C ends the waiting only: the job goes on.
    """
    try:
        with StepProgress(world, config.batch, config.steps) as progress:
            return launcher.wait(run, job, progress)
    except KeyboardInterrupt:
        stop = f"hires cancel {shlex.quote(str(run.path))}"
        print(f"hires: job {job} goes on; `{stop}` stops it", file=sys.stderr)
        raise
