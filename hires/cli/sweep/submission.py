"""Submits runs of a sweep or a retry as jobs, and checks what a scheduler can do for a sweep."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store import campaign
from hires.launcher.interface import FrozenRun, SubmitOptions, Submitted, launcher_of
from hires.launcher.status import running_elsewhere

_SHOWN = 5
"""Points that are named one by one; of more only the arrays are."""


def check_launcher(configs: Sequence[RunConfig], repeat: int, order: str) -> None:
    """Refuses points of several launchers, and repeats in an order that a job array cannot make.

    Args:
        configs: of all points.
        repeat: attempts of every point.
        order: of the attempts, one of ``ORDERS``.

    Raises:
        ConfigError: says what would work.
    """
    names = sorted({config.launcher.name for config in configs})
    if len(names) > 1:
        raise ConfigError(
            f"launcher={','.join(names)}: a sweep has one launcher; sweep once with each"
        )
    if repeat == 1 or not launcher_of(configs[0]).has_jobs:
        return
    if order != "grouped":
        raise ConfigError(
            f"--order {order}: with launcher=slurm each point is one task of an array, which "
            f"makes all its attempts one after the other; leave --order out"
        )
    packs = {config.launcher.pack for config in configs} - {1}
    if packs:
        raise ConfigError(
            f"launcher.pack={max(packs)} and --repeat {repeat}: runs that share a job make "
            f"one attempt each; use launcher.pack=1, or sweep seed=0,1 instead of repeats"
        )


def refuse_beyond(hours: float, points: Iterable[tuple[RunConfig, int]]) -> None:
    """Refuses jobs that may need more than a budget; none is stopped early, so all count in full.

    Args:
        hours: the budget, in ranks times hours.
        points: config and ranks of every attempt that is to be made.

    Raises:
        ConfigError: says how much it may be, and what would work.
    """
    most = sum(
        ranks * config.launcher.minutes * (1 + config.launcher.requeues) / 60
        for config, ranks in points
    )
    if most > hours:
        raise ConfigError(
            f"--budget-gpu-hours {hours:g}: with launcher=slurm these attempts may need {most:g} "
            f"rank hours (the sum of ranks x launcher.minutes x (1 + launcher.requeues)); lower "
            f"launcher.minutes or launcher.requeues, sweep fewer points, or raise the budget"
        )


def submit(
    runs: Sequence[FrozenRun], options: SubmitOptions, freeze: Callable[[Path], object]
) -> list[Submitted]:
    """Submits runs of one launcher, and prints their jobs; one that fails does not stop the others.

    Runs that wait or run already stay as they are. Call it within
    :func:`hires.core.store.campaign.starting`.

    Args:
        runs: the runs.
        options: what holds for all of them.
        freeze: called with the folder of every run that may be submitted.
    """
    if not runs:
        return []
    launcher = launcher_of(runs[0].config)
    folders = sorted({run.path.parent for run in runs})
    for note in (note for folder in folders for note in launcher.repair(folder)):
        print(f"note: {note}", file=sys.stderr)
    refused = running_elsewhere.queued(run.path for run in runs)
    others = running_elsewhere.under_way(run.path for run in runs if run.path not in refused)
    refused |= {path: f"{path.name} is under way: {why}" for path, why in others.items()}
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
    _print(submitted)
    order = {run.path: number for number, run in enumerate(runs)}
    return sorted(submitted, key=lambda one: order[one.path])


def _print(submitted: Sequence[Submitted]) -> None:
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
