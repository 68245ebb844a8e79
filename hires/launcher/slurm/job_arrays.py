"""Submits many frozen runs as few Slurm job arrays.

Runs that want the same of Slurm become the tasks of one array, as long as the cluster allows. An
array has a folder below its campaign, ``arrays/0``, with ``job.sbatch``, which may be submitted by
hand too, and ``points.jsonl``: line k names the runs that task k starts, and their attempts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError, RunError
from hires.core.store import file_names
from hires.core.store.attempts import Attempt, next_attempt
from hires.core.store.campaign import ArrayEntry
from hires.core.store.files import cannot_write, make_folder, write_atomically
from hires.launcher.interface import FrozenRun, SubmitOptions, Submitted
from hires.launcher.local.local_launcher import leave
from hires.launcher.slurm import job_script, sbatch, scheduler
from hires.launcher.slurm.job_script import note_job

FOLDER = "arrays"
"""Folder of all arrays, below that of their campaign."""
MAX_SIZE = 1001
"""Tasks of an array where Slurm does not say how many it allows: its own default."""
Tasks = list[list[FrozenRun]]
"""The runs of each task of an array."""


def submit_all(
    runs: Sequence[FrozenRun], options: SubmitOptions, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Submitted]:
    """Submits runs and yields each, see :meth:`hires.launcher.interface.Launcher.submit_many`.

    Slurm limits each array by itself, so arrays share a limit, and those beyond it wait:

        limit 5, 4 arrays    array 0: 2 tasks at once, then array 3
                             array 1: 2
                             array 2: 1
    """
    arrays = split(runs, max_size())
    lanes = min(options.limit or len(arrays), len(arrays))
    last: list[str | None] = [None] * lanes
    for number, tasks in enumerate(arrays):
        if stopped():
            why = "it was cancelled before it was submitted"
            yield from (Submitted(run.path, None, why) for some in tasks for run in some)
            continue
        lane, share, before = number % lanes, None, None
        if options.limit is not None:
            share = options.limit // lanes + (lane < options.limit % lanes)
            before = last[lane]
        submitted = _submit(tasks, dataclasses.replace(options, limit=share), before)
        last[lane] = next((one.job.partition("_")[0] for one in submitted if one.job), last[lane])
        yield from submitted


def split(runs: Sequence[FrozenRun], most: int) -> list[Tasks]:
    """Returns runs as arrays of at most so many tasks, in the order of their first run."""
    alike: dict[str, list[FrozenRun]] = {}
    for run in runs:
        # What a run wants of Slurm; the tasks of a pack are sized for the largest of its runs.
        config, ranks = run.config, run.ranks if run.config.launcher.pack == 1 else None
        wants: list[Any] = [str(run.path.parent), ranks, run.attempts]
        wants += [dataclasses.asdict(one) for one in (config.launcher, config.cluster)]
        alike.setdefault(json.dumps(wants), []).append(run)
    arrays = []
    for some in alike.values():
        pack = some[0].config.launcher.pack
        tasks = [some[first : first + pack] for first in range(0, len(some), pack)]
        arrays += [tasks[first : first + most] for first in range(0, len(tasks), most)]
    return arrays


def max_size() -> int:
    """Returns how many tasks an array may have: the largest index is one less."""
    try:
        text = scheduler.ask("scontrol", "show", "config")
    except RunError:
        return MAX_SIZE  # if Slurm is not here at all, sbatch will say so
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return max(1, int(match[1])) if match else MAX_SIZE


def _submit(tasks: Tasks, options: SubmitOptions, before: str | None) -> list[Submitted]:
    """Submits one array, after another one if that is given; returns its runs."""
    attempts: dict[Path, int] = {}
    submitted = []
    for run in (run for some in tasks for run in some):
        try:
            attempts[run.path] = next_attempt(run.path, run.argv)
        except RunError as error:
            submitted.append(Submitted(run.path, None, str(error)))
    tasks = [[run for run in some if run.path in attempts] for some in tasks]
    tasks = [some for some in tasks if some]
    if not tasks:
        return submitted
    try:
        job = _sbatch(tasks, attempts, options, before)
    except HiresError as error:
        for path, attempt in attempts.items():
            leave(path, attempt, "failed", str(error))
        return submitted + [Submitted(path, None, str(error)) for path in attempts]
    for index, some in enumerate(tasks):
        for run in some:
            note_job(file_names.attempt_dir(run.path, attempts[run.path]), job, index, len(some))
            submitted.append(Submitted(run.path, f"{job}_{index}", None))
    return submitted


def _sbatch(
    tasks: Tasks, attempts: dict[Path, int], options: SubmitOptions, before: str | None
) -> str:
    """Writes the folder of an array and submits it; returns its number.

    Raises:
        ConfigError: Slurm refuses an option, whose line is shown.
        RunError: the folder cannot be written, or Slurm is not here.
    """
    largest = max((run for some in tasks for run in some), key=lambda run: run.ranks)
    folder = _new_folder(largest.path.parent / FOLDER)
    lines = []
    for some in tasks:
        numbers = [(run, attempts[run.path]) for run in some]
        entries = [
            ArrayEntry(run.path.name, number, Attempt(run.path, number).id, run.attempts)
            for run, number in numbers
        ]
        lines.append(json.dumps([dataclasses.asdict(entry) for entry in entries]) + "\n")
    write_atomically(folder / file_names.POINTS, "".join(lines))
    shape = job_script.ArrayShape(len(tasks), options.limit, options.exclude, largest.attempts)
    config = largest.config
    script = job_script.JobScript(folder, config, largest.ranks, options.argv, shape).write()
    words = sbatch.after(config, options.after, before and f"afterany:{before}")
    job = sbatch.submit(script, words)
    note_job(folder, job, None)
    return job


def _new_folder(parent: Path) -> Path:
    """Makes the folder of the next array and returns it.

    Raises:
        RunError: it cannot be made.
    """
    make_folder(parent)
    number = sum(1 for _ in parent.iterdir())
    while True:
        try:
            (parent / str(number)).mkdir()
            return parent / str(number)
        except FileExistsError:  # of another command
            number += 1
        except OSError as error:
            raise cannot_write(parent, error) from error
