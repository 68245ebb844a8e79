"""How do the points of a sweep become Slurm jobs? As the elements of job arrays."""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hires.core import campaign
from hires.core.config import RunConfig
from hires.core.errors import ConfigError
from hires.launcher import arrays
from hires.launcher.arrays import Options, Submitted, Wanted
from hires.launcher.queue import Task
from hires.launcher.waiting import queued

_SHOWN = 5
"""Points that are named one by one; of more only the arrays are."""


def uses_slurm(configs: Sequence[RunConfig], repeat: int) -> bool:
    """Whether the points of a sweep are to be submitted.

    Args:
        configs: of all points.
        repeat: attempts of every point.

    Raises:
        ConfigError: some are and some are not, or a point is to have several attempts at once.
    """
    names = sorted({config.launcher.name for config in configs})
    if len(names) > 1:
        raise ConfigError(
            f"launcher={','.join(names)}: a sweep has one launcher; sweep once with each"
        )
    if names == ["slurm"] and repeat > 1:
        raise ConfigError(
            f"--repeat {repeat} makes several attempts in one run folder, one after the other, "
            f"which launcher=slurm does not; sweep campaign=NAME,NAME2 or seed=0,1 instead"
        )
    return names == ["slurm"]


def submit_all(
    tasks: Sequence[Task], configs: Mapping[Path, RunConfig], options: Options
) -> list[Submitted]:
    """Submits frozen points, and says so; one that fails does not stop the others.

    Args:
        tasks: the points.
        configs: their configs, by run folder.
        options: what holds for all of them.
    """
    wanted = [Wanted(task.path, task.argv, task.ranks, configs[task.path]) for task in tasks]
    with campaign.starting(run.path.parent for run in wanted):
        return submit(wanted, options)


def submit(wanted: Sequence[Wanted], options: Options) -> list[Submitted]:
    """Submits frozen runs, and says so, but those that wait or run already.

    Call it within :func:`hires.core.campaign.starting`.

    Args:
        wanted: the runs.
        options: what holds for all of them.
    """
    for folder in sorted({run.path.parent for run in wanted}):
        for note in arrays.mend(folder):
            print(f"note: {note}", file=sys.stderr)
    refused = queued(run.path for run in wanted)
    found = [Submitted(path, None, why) for path, why in refused.items()]
    free = [run for run in wanted if run.path not in refused]
    folders = {run.path.parent for run in free}
    found += arrays.submit_all(free, options, lambda: any(map(campaign.is_stopped, folders)))
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
