"""Starts a planned run and waits for its end, for the verbs ``run``, ``retry`` and ``verify``."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.cli.screens.progress_bar import StepProgress
from hires.core.config.run_config import RunConfig
from hires.core.store import file_names, records
from hires.core.store.campaign import starting
from hires.core.store.rundir import RunDir, create, freeze, run_path
from hires.launcher.interface import Outcome, launcher_of
from hires.launcher.status import running_elsewhere
from hires.launcher.supervision.hang_page import head
from hires.plan.plan import Plan

_ENDS = {"failed": "failed", "cancelled": "was cancelled", "lost": "is lost"}


def write_run(config: RunConfig, plan: Plan, argv: Sequence[str]) -> list[Path]:
    """Writes the folder of a run without an attempt; returns the scripts that start it by hand.

    Raises:
        RunError: the run is under way, or its folder cannot be written.
    """
    path = run_path(config)
    with starting([path.parent]):
        running_elsewhere.refuse_queued(path)
        with running_elsewhere.alone(path, None, None):
            freeze(config, plan.to_dict(), argv)
    print(f"run folder: {path}", file=sys.stderr)
    return launcher_of(config).write_scripts(path, config, plan.world, argv)


def begin_run(
    config: RunConfig,
    plan: Plan,
    argv: Sequence[str],
    *,
    seen: int | None,
    after: str | None = None,
    again: bool = False,
) -> tuple[RunDir, str | None]:
    """Returns the folder of a run with a fresh attempt, and its job if its launcher has jobs.

    Args:
        config: the config to freeze.
        plan: its plan.
        argv: the command line as typed.
        seen: the latest attempt before the run was planned; None: it had none.
        after: what the job waits for, from :meth:`hires.launcher.interface.Launcher.dependency`.
        again: whether a complete run gets another attempt; else it is returned as it is.

    Raises:
        RunError: the run is under way, or its folder cannot be written.
        ConfigError: the scheduler refuses the job.
    """
    path, launcher = run_path(config), launcher_of(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(starting([path.parent]))
        running_elsewhere.refuse_queued(path)
        if again or records.done_attempt(path) is None:
            running_elsewhere.refuse_begun(path, seen)
            stack.enter_context(running_elsewhere.alone(path, None, None))
        run = create(config, plan.to_dict(), argv, again=again)
        if run.complete:  # by another command, while this one planned
            return run, None
        launcher.write_scripts(run.path, config, plan.world, argv)
        print(f"run folder: {run.path}", file=sys.stderr)
        return run, launcher.submit(run, config, after)


def wait_for(
    config: RunConfig, run: RunDir, world: int, job: str | None = None, args: Sequence[str] = ()
) -> Outcome:
    """Returns how an attempt ended; shows the steps meanwhile. Without a job it starts the ranks.

    Args:
        config: the frozen config.
        run: the folder and its fresh attempt.
        world: number of ranks.
        job: the job of the attempt; Ctrl-C ends the waiting only.
        args: further words for every rank.

    Raises:
        ConfigError: the port that the config names is taken.
        RunError: the ranks cannot be started.
    """
    try:
        with StepProgress(world, config.batch, config.steps) as progress:
            return launcher_of(config).wait(run, job, progress, args)
    except KeyboardInterrupt:
        if job is not None:
            stop = f"hires cancel {shlex.quote(str(run.path))}"
            print(f"hires: job {job} goes on; `{stop}` stops it", file=sys.stderr)
        raise


def print_job(config: RunConfig, run: RunDir, job: str, as_json: bool) -> None:
    """Prints the job of a run, and the commands that watch and stop it."""
    if as_json:
        print(json.dumps({"run": str(run.path), "attempt": run.attempt, "job": job}, indent=2))
        return
    print(f"job {job} is attempt {run.attempt} of {run.path}")
    path = shlex.quote(str(run.path))
    hints = launcher_of(config).hints(run, job)
    hints += [("its tables:", f"hires show {path}"), ("to stop it:", f"hires cancel {path}")]
    for what, command in hints:
        print(f"  {what:<16}{command}")


def explain(outcome: Outcome, run: RunDir, keep: bool = True) -> None:
    """Prints why an attempt failed; nothing if it did not.

    Args:
        outcome: how the attempt ended.
        run: its folder.
        keep: whether the folder stays, so that it may be named.
    """
    if outcome.exit_code == 0:
        return
    print(f"hires: the run {_ENDS[outcome.state]}: {outcome.cause}", file=sys.stderr)
    page = head(run.attempt_dir) if outcome.reason == "hang" else []
    for line in page[2:]:  # it begins with the cause, which was printed
        print(f"  {line}", file=sys.stderr)
    if page and keep:
        print(f"the whole page: {run.attempt_dir / file_names.HANG}", file=sys.stderr)
    if outcome.tail:
        print(f"last lines of rank {outcome.failed_rank}:", file=sys.stderr)
        for line in outcome.tail:
            print(f"  {line}", file=sys.stderr)
    if keep:
        print(f"all lines: {run.attempt_dir / file_names.LOGS}", file=sys.stderr)


def warn_of_checkpoints(run: RunDir) -> None:
    """Prints which checkpoints an attempt could not write, and which it found damaged."""
    for line in records.read_lines(run.attempt_dir / file_names.EVENTS):
        if line.get("event") == "checkpoint_failed":
            print(f"warning: no checkpoint of step {line['step']}: {line['text']}", file=sys.stderr)
        elif line.get("event") == "checkpoint_damaged":
            print(f"warning: {line['text']}", file=sys.stderr)
