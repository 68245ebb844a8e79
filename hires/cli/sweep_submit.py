"""How do the points of a sweep become Slurm jobs? Each is one, submitted as by ``hires run``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hires.cli.submitting import submitted
from hires.core import rundir
from hires.core.config import RunConfig
from hires.core.errors import ConfigError, HiresError
from hires.launcher import slurm
from hires.launcher.queue import Task
from hires.launcher.waiting import refuse_queued


class Submitted(NamedTuple):
    """A point and what became of it."""

    path: Path
    """The run folder."""
    job: str | None
    """Number of its job; None if it was not submitted."""
    why: str | None
    """Why it was not."""


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


def submit_all(tasks: Sequence[Task], configs: Mapping[Path, RunConfig]) -> list[Submitted]:
    """Submits frozen points as one job each, and says so; one that fails does not stop the others.

    Args:
        tasks: the points.
        configs: their configs, by run folder.
    """
    found = []
    for task in tasks:
        try:
            found.append(Submitted(task.path, _submit(task, configs[task.path]), None))
            print(f"{task.path.name}: job {found[-1].job}", file=sys.stderr)
        except HiresError as error:
            found.append(Submitted(task.path, None, str(error)))
            print(f"hires: {task.path.name} was not submitted: {error}", file=sys.stderr)
    return found


def _submit(task: Task, config: RunConfig) -> str:
    """Submits one point; returns the number of its job."""
    refuse_queued(task.path)
    run = rundir.start_attempt(task.path, task.argv)
    slurm.write_script(run.path, config, task.ranks, task.argv)
    return submitted(run)
