"""Starts planned runs, here or as jobs, waits for their end and explains it."""

from __future__ import annotations

import collections
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hires.cli.screens.progress import StepProgress
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import campaign, file_names
from hires.core.store.reading import read_lines
from hires.core.store.rundir import RunDir
from hires.launcher.interface import FrozenRun, Outcome, SubmitOptions, Submitted, launcher_of
from hires.launcher.status import running_elsewhere
from hires.launcher.supervision.watchdog import hang_head

_SHOWN = 5
"""Jobs that are named one by one; of more only the arrays are."""
_ENDS = {"failed": "failed", "cancelled": "was cancelled", "lost": "is lost"}


def submit(
    runs: Sequence[FrozenRun], options: SubmitOptions, freeze: Callable[[Path], object]
) -> list[Submitted]:
    """Submits runs of one launcher, and prints their jobs; one that fails does not stop the others.

    Runs that wait or run already stay as they are; ``freeze`` is called with the folder of every
    other one. Call it within :func:`hires.core.store.campaign.starting`.
    """
    if not runs:
        return []
    launcher = launcher_of(runs[0].config)
    folders = sorted({run.path.parent for run in runs})
    for note in (note for folder in folders for note in launcher.repair(folder)):
        print(f"note: {note}", file=sys.stderr)
    held = running_elsewhere.holders(run.path for run in runs)
    refused = {path: f"{path.name} is under way: {why}" for path, why in held.items()}
    for run in runs:
        if run.path not in refused:
            try:
                freeze(run.path)
            except RunError as error:
                refused[run.path] = str(error)
    submitted = [Submitted(path, None, why) for path, why in refused.items()]
    free = [run for run in runs if run.path not in refused]
    submitted += launcher.submit_many(
        free, options, lambda: any(map(campaign.is_stopped, {run.path.parent for run in free}))
    )
    _print_jobs(submitted)
    order = {run.path: number for number, run in enumerate(runs)}
    return sorted(submitted, key=lambda one: order[one.path])


def wait_for(
    config: RunConfig, run: RunDir, world: int, job: str | None = None, args: Sequence[str] = ()
) -> Outcome:
    """Returns how an attempt ended; shows the steps meanwhile. Without a job it starts the ranks.

    Ctrl-C ends the waiting for a job only. ``args`` are further words for every rank.

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


def explain(outcome: Outcome, run: RunDir, keep: bool = True) -> None:
    """Prints what went wrong with checkpoints, and why an attempt failed if it did.

    The folder is named only if it is to be kept.
    """
    if keep:
        for event in read_lines(run.attempt_dir / file_names.EVENTS):
            if event.get("event") == "checkpoint_failed":
                text = f"no checkpoint of step {event['step']}: {event['text']}"
                print(f"warning: {text}", file=sys.stderr)
            elif event.get("event") == "checkpoint_damaged":
                print(f"warning: {event['text']}", file=sys.stderr)
    if outcome.exit_code == 0:
        return
    print(f"hires: the run {_ENDS[outcome.state]}: {outcome.cause}", file=sys.stderr)
    page = hang_head(run.attempt_dir) if outcome.reason == "hang" else []
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


def _print_jobs(submitted: Sequence[Submitted]) -> None:
    """Prints the jobs of runs, and why others have none, each reason once."""
    jobs = [one for one in submitted if one.job is not None]
    if len(jobs) <= _SHOWN:
        for one in jobs:
            print(f"{one.path.name}: job {one.job}", file=sys.stderr)
    else:
        arrays = collections.Counter(str(one.job).partition("_")[0] for one in jobs)
        for number, count in arrays.items():
            print(f"job array {number}: {count} points", file=sys.stderr)
    reasons = collections.defaultdict(list)
    for one in submitted:
        if one.why is not None:
            reasons[one.why].append(one.path.name)
    for why, names in reasons.items():
        others = f" and {len(names) - 1} more were" if len(names) > 1 else " was"
        print(f"hires: {names[0]}{others} not submitted: {why}", file=sys.stderr)
