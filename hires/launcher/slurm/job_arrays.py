"""Submits many frozen runs as few Slurm job arrays, and finds jobs whose submission was cut short.

Runs that want the same of Slurm become the tasks of one array. Its folder ``arrays/0`` has
``job.sbatch`` and ``points.jsonl``: line k names the run and attempt that task k starts.

sbatch may die, or stop waiting, after the controller has taken the job. Such a job is found in the
queue by the script that it runs; otherwise the run would be submitted twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError, RunError
from hires.core.store import file_names
from hires.core.store.attempts import Attempt, job_in, latest, next_attempt
from hires.core.store.campaign import ArrayEntry, read_array
from hires.core.store.files import cannot_write, make_folder, write_atomically
from hires.launcher.interface import FrozenRun, SubmitOptions, Submitted
from hires.launcher.local.local_launcher import leave
from hires.launcher.slurm import job_script, scheduler
from hires.launcher.slurm.job_script import note_job

FOLDER = "arrays"
"""Folder of all arrays, below that of their campaign."""
MAX_SIZE = "1001"
"""Tasks of an array where Slurm does not say how many it allows: its own default."""


def submit_all(
    runs: Sequence[FrozenRun], options: SubmitOptions, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Submitted]:
    """Submits runs and yields each, see :meth:`hires.launcher.interface.Launcher.submit_many`.

    Slurm limits each array by itself, so arrays share a limit, and those beyond it wait:

        limit 5, 4 arrays    array 0: 2 tasks at once, then array 3
                             array 1: 2
                             array 2: 1
    """
    try:  # the largest index is one less
        most = max(1, int(scheduler.config().get("MaxArraySize", MAX_SIZE)))
    except RunError:  # if Slurm is not here at all, sbatch will say so
        most = int(MAX_SIZE)
    arrays = split(runs, most)
    lanes = min(options.limit or len(arrays), len(arrays))
    last: list[str | None] = [None] * lanes
    for number, tasks in enumerate(arrays):
        if stopped():
            why = "it was cancelled before it was submitted"
            yield from (Submitted(run.path, None, why) for run in tasks)
            continue
        lane, share, before = number % lanes, None, None
        if options.limit is not None:
            share = options.limit // lanes + (lane < options.limit % lanes)
            before = last[lane]
        submitted = _submit(tasks, dataclasses.replace(options, limit=share), before)
        last[lane] = next((one.job.partition("_")[0] for one in submitted if one.job), last[lane])
        yield from submitted


def split(runs: Sequence[FrozenRun], most: int) -> list[list[FrozenRun]]:
    """Returns runs as arrays of at most so many tasks, in the order of their first run."""
    alike: dict[str, list[FrozenRun]] = {}
    for run in runs:
        config = run.config
        wants: list[Any] = [str(run.path.parent), run.ranks, run.attempts]
        wants += [dataclasses.asdict(one) for one in (config.launcher, config.cluster)]
        alike.setdefault(json.dumps(wants), []).append(run)
    arrays = []
    for some in alike.values():
        arrays += [some[first : first + most] for first in range(0, len(some), most)]
    return arrays


def _submit(
    tasks: Sequence[FrozenRun], options: SubmitOptions, before: str | None
) -> list[Submitted]:
    """Submits one array, after another one if that is given; returns its runs."""
    submitted: list[Submitted] = []
    begun: list[tuple[FrozenRun, Attempt]] = []
    for run in tasks:
        try:
            begun.append((run, Attempt(run.path, next_attempt(run.path, run.argv))))
        except RunError as error:
            submitted.append(Submitted(run.path, None, str(error)))
    if not begun:
        return submitted
    try:
        job = _sbatch(begun, options, before)
    except HiresError as error:
        for run, attempt in begun:
            leave(run.path, attempt.number, "failed", str(error))
            submitted.append(Submitted(run.path, None, str(error)))
        return submitted
    for index, (run, attempt) in enumerate(begun):
        note_job(attempt.folder, job, index)
        submitted.append(Submitted(run.path, f"{job}_{index}", None))
    return submitted


def _sbatch(
    tasks: Sequence[tuple[FrozenRun, Attempt]], options: SubmitOptions, before: str | None
) -> str:
    """Writes the folder of an array and submits it; returns its number."""
    first, _ = tasks[0]  # all want the same
    folder, config = _new_folder(first.path.parent / FOLDER), first.config
    entries = [ArrayEntry(run.path.name, a.number, a.id, run.attempts) for run, a in tasks]
    lines = (json.dumps(dataclasses.asdict(entry)) + "\n" for entry in entries)
    write_atomically(folder / file_names.POINTS, "".join(lines))
    shape = job_script.ArrayShape(len(tasks), options.limit, options.exclude, first.attempts)
    script = job_script.write_script(folder, config, first.ranks, options.argv, shape)
    words = job_script.after(config, options.after, before and f"afterany:{before}")
    job = job_script.submit(script, words)
    note_job(folder, job, None)
    return job


def _new_folder(parent: Path) -> Path:
    """Makes the folder of the next array and returns it, or raises a RunError."""
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


def orphan_jobs(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns the jobs of runs whose latest attempt was not begun and has no ``job.json``.

    Slurm is only queried if there are such runs with a script; no answer means no job.
    """
    waiting = {
        run: last.number
        for run in runs
        if (last := latest(run))
        and not last.launched
        and not (last.folder / file_names.JOB).exists()
    }
    # By script, and for arrays by the index of the task.
    scripts = {
        (str(script), ""): run
        for run in waiting
        if (script := run / file_names.JOB_SCRIPT).exists()
    }
    for campaign in {run.parent for run in waiting}:
        for folder in _arrays(campaign):
            if (folder / file_names.JOB).exists():
                continue
            with contextlib.suppress(RunError):  # repair() reports a damaged list
                for index, entry in enumerate(read_array(folder)):
                    if waiting.get(campaign / entry.run) == entry.attempt:
                        script = folder / file_names.JOB_SCRIPT
                        scripts[str(script), str(index)] = campaign / entry.run
    jobs: dict[Path, str] = {}
    for name, path in scheduler.scripts_of_all() if scripts else ():
        run = scripts.get((path, name.partition("_")[2]))
        if run is not None:
            jobs.setdefault(run, name)
    return jobs


def repair(campaign: Path) -> Iterator[str]:
    """Writes ``job.json`` of attempts whose array has one; yields what is damaged, in words."""
    for array in _arrays(campaign):
        job = job_in(array, [])
        if not job:
            if (array / file_names.JOB).exists():
                yield f"{array / file_names.JOB} is damaged: the job of its runs is unknown"
            continue
        try:
            tasks = read_array(array)
        except RunError as error:
            yield str(error)
            continue
        for index, entry in enumerate(tasks):
            attempt = Attempt(campaign / entry.run, entry.attempt)
            is_noted = attempt.has_ended or (attempt.folder / file_names.JOB).exists()
            if entry.id is not None and entry.id == attempt.id and not is_noted:
                note_job(attempt.folder, str(job["job"]), index)


def _arrays(campaign: Path) -> list[Path]:
    lists = (campaign / FOLDER).glob(f"*/{file_names.POINTS}")
    return sorted(path.parent for path in lists)
