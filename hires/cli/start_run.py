"""Starts planned runs, here or as jobs, waits for their end and explains it."""

from __future__ import annotations

import collections
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from hires.cli.screens.progress import StepProgress
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import campaign, file_names
from hires.core.store.attempts import Attempt
from hires.core.store.ends import End
from hires.core.store.rundir import RunDir
from hires.launcher.interface import FrozenRun, SubmitOptions, Submitted, launcher_of
from hires.launcher.status import running_elsewhere
from hires.launcher.supervision.watchdog import hang_head

_SHOWN = 5  # jobs that are named one by one; of more only the arrays are
ENDS = {"failed": "failed", "cancelled": "was cancelled", "lost": "is lost"}


def submit(
    runs: Sequence[FrozenRun],
    options: SubmitOptions,
    freeze: Callable[[Path], object],
    seen: Mapping[Path, int | None] = MappingProxyType({}),
) -> list[Submitted]:
    """Submits runs of one launcher, each by itself, and prints their jobs.

    Those under way, or begun since their latest attempt was ``seen``, stay; others are frozen.
    """
    launcher = launcher_of(runs[0].config)
    folders = sorted({run.path.parent for run in runs})
    with campaign.starting(folders):
        held, refused = running_elsewhere.holders(run.path for run in runs), {}
        for path in (run.path for run in runs):
            try:
                if path in seen:
                    running_elsewhere.refuse_begun(path, seen[path])
                if path in held:
                    raise RunError(f"{path.name} is under way: {held[path]}")
                freeze(path)
            except RunError as error:
                refused[path] = str(error)
        submitted = [Submitted(path, None, why) for path, why in refused.items()]
        free = [run for run in runs if run.path not in refused]
        submitted += launcher.submit_many(
            free, options, lambda: any(map(campaign.is_stopped, folders))
        )
    _print_jobs(submitted)
    order = {run.path: number for number, run in enumerate(runs)}
    return sorted(submitted, key=lambda one: order[one.path])


def wait_for(
    config: RunConfig, run: RunDir, world: int, job: str | None = None, args: Sequence[str] = ()
) -> End:
    """Returns how an attempt ended; shows the steps meanwhile. Without a job it starts the ranks.

    Ctrl-C ends the waiting for a job only. ``args`` are further words for every rank.
    """
    try:
        with StepProgress(world, config.batch, config.steps) as progress:
            return launcher_of(config).wait(run, job, progress, args)
    except KeyboardInterrupt:
        if job is not None:
            stop = f"hires cancel {shlex.quote(str(run.path))}"
            print(f"hires: job {job} goes on; `{stop}` stops it", file=sys.stderr)
        raise


def explain(outcome: End, run: RunDir, keep: bool = True, *, head: bool = True) -> None:
    """Prints what went wrong with checkpoints, and why an attempt failed; names a kept folder.

    Without ``head`` the cause itself is left to an error of the caller's.
    """
    lines = []
    for event in Attempt(run, run.attempt).events if keep else ():
        if event.get("event") == "checkpoint_failed":
            lines.append(f"warning: no checkpoint of step {event['step']}: {event['text']}")
        elif event.get("event") in ("checkpoint_damaged", "resume_differs"):
            lines.append(f"warning: {event['text']}")
    lines = [*dict.fromkeys(lines)]  # ranks that read one file say the same of it
    if outcome.exit_code != 0:
        lines += [f"hires: the run {ENDS[outcome.state]}: {outcome.cause}"] if head else []
        page = hang_head(run.attempt_dir) if outcome.reason == "hang" else []
        lines += [f"  {line}" for line in page[2:]]  # it begins with the cause
        if page and keep:
            lines.append(f"the whole page: {run.attempt_dir / file_names.HANG}")
        if outcome.tail:
            lines.append(f"last lines of rank {outcome.failed_rank}:")
            lines += [f"  {line}" for line in outcome.tail]
        if keep:
            lines.append(f"all lines: {run.attempt_dir / file_names.LOGS}")
    for line in lines:
        print(line, file=sys.stderr)


def _print_jobs(submitted: Sequence[Submitted]) -> None:
    jobs = [one for one in submitted if one.job is not None]
    lines = [f"{one.path.name}: job {one.job}" for one in jobs]
    if len(jobs) > _SHOWN:
        arrays = collections.Counter(str(one.job).partition("_")[0] for one in jobs)
        lines = [f"job array {number}: {count} points" for number, count in arrays.items()]
    reasons = collections.defaultdict(list)
    for one in submitted:
        if one.why is not None:
            reasons[one.why].append(one.path.name)
    for why, names in reasons.items():
        others = f" and {len(names) - 1} more were" if len(names) > 1 else " was"
        lines.append(f"hires: {names[0]}{others} not submitted: {why}")
    for line in lines:
        print(line, file=sys.stderr)
