"""How do the points of a sweep become Slurm jobs? As the elements of job arrays."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store import campaign
from hires.launcher.interface import FrozenRun, SubmitOptions, Submitted, launcher_of
from hires.launcher.local.queue_tasks import Task
from hires.launcher.status import running_elsewhere

_SHOWN = 5
"""Points that are named one by one; of more only the arrays are."""


def has_jobs(configs: Sequence[RunConfig], repeat: int, order: str) -> bool:
    """Whether the points of a sweep are to be submitted.

    Args:
        configs: of all points.
        repeat: attempts of every point.
        order: of the attempts, one of ``ORDERS``.

    Raises:
        ConfigError: some are and some are not, or their attempts cannot be made as asked.
    """
    names = sorted({config.launcher.name for config in configs})
    if len(names) > 1:
        raise ConfigError(
            f"launcher={','.join(names)}: a sweep has one launcher; sweep once with each"
        )
    if not configs or not launcher_of(configs[0]).has_jobs:
        return False
    if repeat > 1:
        _refuse_repeats(configs, repeat, order)
    return True


def _refuse_repeats(configs: Sequence[RunConfig], repeat: int, order: str) -> None:
    """Refuses repeats in an order that an array does not have.

    Raises:
        ConfigError: says what would work.
    """
    if order != "grouped":
        raise ConfigError(
            f"--order {order}: with launcher=slurm each point is one element of an array, which "
            f"makes all its attempts one after the other; leave --order out"
        )
    packs = {config.launcher.pack for config in configs} - {1}
    if packs:
        raise ConfigError(
            f"launcher.pack={max(packs)} and --repeat {repeat}: runs that share an element make "
            f"one attempt each; use launcher.pack=1, or sweep seed=0,1 instead of repeats"
        )


def refuse_beyond(hours: float, points: Iterable[tuple[RunConfig, int]]) -> None:
    """Refuses points that may need more than a budget; nobody watches jobs, so all count in full.

    Args:
        hours: the budget, in ranks times hours.
        points: config and ranks of every attempt that is to be made.

    Raises:
        ConfigError: says how much it may be, and what would work.
    """
    most = sum(
        ranks * config.launcher.minutes * (1 + config.launcher.requeues) / _MINUTES
        for config, ranks in points
    )
    if most > hours:
        raise ConfigError(
            f"--budget-gpu-hours {hours:g}: with launcher=slurm these attempts may need {most:g} "
            f"rank hours (the sum of ranks x launcher.minutes x (1 + launcher.requeues)); lower "
            f"launcher.minutes or launcher.requeues, sweep fewer points, or raise the budget"
        )


_MINUTES = 60
"""Of an hour."""


Freeze = Callable[[Path], object]
"""Freezes what a run is to start with in its folder."""


def submit_all(
    tasks: Sequence[Task], configs: Mapping[Path, RunConfig], options: SubmitOptions, freeze: Freeze
) -> list[Submitted]:
    """Submits points, and says so; one that fails does not stop the others.

    Args:
        tasks: the attempts; several of one point are made by one element.
        configs: their configs, by run folder.
        options: what holds for all of them.
        freeze: is called for every point that may be submitted.
    """
    counts = collections.Counter(task.path for task in tasks)
    first = {task.path: task for task in reversed(tasks)}
    wanted = [
        FrozenRun(path, first[path].argv, first[path].ranks, configs[path], count)
        for path, count in counts.items()
    ]
    with campaign.starting(run.path.parent for run in wanted):
        return submit(wanted, options, freeze)


def submit(wanted: Sequence[FrozenRun], options: SubmitOptions, freeze: Freeze) -> list[Submitted]:
    """Submits runs, and says so, but those that wait or run already, which stay as they are.

    Call it within :func:`hires.core.store.campaign.starting`.

    Args:
        wanted: the runs.
        options: what holds for all of them.
        freeze: is called for every run that may be submitted.
    """
    if not wanted:
        return []
    launcher = launcher_of(wanted[0].config)
    for folder in sorted({run.path.parent for run in wanted}):
        for note in launcher.repair(folder):
            print(f"note: {note}", file=sys.stderr)
    refused = running_elsewhere.queued(run.path for run in wanted)
    others = running_elsewhere.under_way(run.path for run in wanted if run.path not in refused)
    refused |= {path: f"{path.name} is under way: {why}" for path, why in others.items()}
    for run in wanted:
        if run.path not in refused:
            try:
                freeze(run.path)
            except RunError as error:
                refused[run.path] = str(error)
    found = [Submitted(path, None, why) for path, why in refused.items()]
    free = [run for run in wanted if run.path not in refused]
    folders = {run.path.parent for run in free}
    found += launcher.submit_many(free, options, lambda: any(map(campaign.is_stopped, folders)))
    _say(found)
    order = {run.path: number for number, run in enumerate(wanted)}
    return sorted(found, key=lambda one: order[one.path])


def _say(found: Sequence[Submitted]) -> None:
    """Says which points are which jobs, and why others are none."""
    jobs = [one for one in found if one.job is not None]
    if len(jobs) <= _SHOWN:
        for one in jobs:
            print(f"{one.path.name}: job {one.job}", file=sys.stderr)
    else:
        arrays_of = collections.Counter(str(one.job).partition("_")[0] for one in jobs)
        for number, count in arrays_of.items():
            print(f"job array {number}: {count} points", file=sys.stderr)
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.why is not None:
            reasons.setdefault(one.why, []).append(one.path.name)
    for why, names in reasons.items():
        others = f" and {len(names) - 1} more were" if len(names) > 1 else " was"
        print(f"hires: {names[0]}{others} not submitted: {why}", file=sys.stderr)
