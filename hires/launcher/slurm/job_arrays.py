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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write, make_folder, write_atomically
from hires.launcher.interface import FrozenRun, SubmitOptions, Submitted, job_name, note_job
from hires.launcher.local.local_launcher import leave
from hires.launcher.slurm import allocation, job_script, sbatch

FOLDER = "arrays"
"""Folder of all arrays, below that of their campaign."""
LIST = file_names.POINTS
MAX_SIZE = 1001
"""Tasks of an array where Slurm does not say how many it allows: its own default."""
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of reading a damaged line of a list."""


@dataclass(frozen=True)
class JobArray:
    """Runs that are submitted together."""

    tasks: list[list[FrozenRun]]
    """The runs of each task, one after the other."""

    @property
    def largest(self) -> FrozenRun:
        """The run with most ranks, for which every task is sized."""
        return max((run for some in self.tasks for run in some), key=lambda run: run.ranks)


class ArrayEntry(NamedTuple):
    """A run of a task."""

    run: str
    """Name of its folder, below that of the campaign."""
    attempt: int
    """The attempt that was submitted."""
    id: str | None = None
    """``id`` of ``env.json``, which a folder that was made anew does not share."""
    attempts: int = 1
    """How many complete attempts the task is to make."""


def submit_all(
    runs: Sequence[FrozenRun], options: SubmitOptions, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Submitted]:
    """Submits runs and yields each, see :meth:`hires.launcher.interface.Launcher.submit_many`."""
    arrays = split(runs, max_size())
    lanes = min(options.limit or len(arrays), len(arrays))
    last: list[str | None] = [None] * lanes
    for number, array in enumerate(arrays):
        if stopped():
            why = "it was cancelled before it was submitted"
            yield from (Submitted(run.path, None, why) for some in array.tasks for run in some)
            continue
        lane = number % lanes
        # Slurm limits each array by itself, so arrays share the limit and those beyond it wait.
        share = _share(options.limit, lane, lanes)
        before = None if options.limit is None else last[lane]
        submitted = _submit(array, dataclasses.replace(options, limit=share), before)
        last[lane] = next((one.job.partition("_")[0] for one in submitted if one.job), last[lane])
        yield from submitted


def split(runs: Sequence[FrozenRun], most: int) -> list[JobArray]:
    """Returns runs as arrays of at most so many tasks, in the order of their first run."""
    alike: dict[str, list[FrozenRun]] = {}
    for run in runs:
        alike.setdefault(_wants(run), []).append(run)
    arrays = []
    for some in alike.values():
        pack = some[0].config.launcher.pack
        tasks = [some[first : first + pack] for first in range(0, len(some), pack)]
        arrays += [JobArray(tasks[first : first + most]) for first in range(0, len(tasks), most)]
    return arrays


def read_entries(folder: Path, index: int) -> list[ArrayEntry]:
    """Returns the runs of an task.

    Args:
        folder: of the array.
        index: of the task.

    Raises:
        RunError: the list cannot be read, or has no such task.
    """
    path = folder / LIST
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        if not 0 <= index < len(lines):
            raise RunError(f"{path} has {len(lines)} lines, of which none is element {index}")
        return _entries(lines[index])
    except (OSError, *_DAMAGED) as error:
        raise RunError(f"{path} cannot be read ({error}); submit the points again") from None


def read_all(path: Path) -> list[list[ArrayEntry]]:
    """Returns the runs of all tasks.

    Args:
        path: of the list.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return [_entries(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, *_DAMAGED) as error:
        raise RunError(
            f"{path} is damaged ({error}): which runs its job has is not known any more"
        ) from None


def _entries(line: str) -> list[ArrayEntry]:
    return [
        ArrayEntry(str(one["run"]), int(one["attempt"]), one.get("id"), int(one.get("attempts", 1)))
        for one in json.loads(line)
    ]


def max_size() -> int:
    """Returns how many tasks an array may have: the largest index is one less."""
    try:
        text = allocation.ask("scontrol", "show", "config")
    except RunError:
        return MAX_SIZE  # if Slurm is not here at all, sbatch will say so
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return max(1, int(found[1])) if found else MAX_SIZE


def _wants(run: FrozenRun) -> str:
    """Returns what a run wants of Slurm; runs that want the same may share an array."""
    config = run.config
    ranks = run.ranks if config.launcher.pack == 1 else None
    sections = [dataclasses.asdict(one) for one in (config.launcher, config.cluster)]
    return json.dumps([str(run.path.parent), ranks, run.attempts, *sections])


def _share(limit: int | None, lane: int, lanes: int) -> int | None:
    """Returns how many tasks of a lane may run at once.

    >>> [_share(5, lane, 3) for lane in range(3)]
    [2, 2, 1]
    """
    return None if limit is None else limit // lanes + (lane < limit % lanes)


def _submit(array: JobArray, options: SubmitOptions, before: str | None) -> list[Submitted]:
    """Submits one array, after another one if that is given; returns its runs."""
    attempts: dict[Path, int] = {}
    submitted = []
    for run in (run for some in array.tasks for run in some):
        try:
            attempts[run.path] = rundir.start_attempt(run.path, run.argv).attempt
        except RunError as error:
            submitted.append(Submitted(run.path, None, str(error)))
    tasks = [[run for run in some if run.path in attempts] for some in array.tasks]
    tasks = [some for some in tasks if some]
    if not tasks:
        return submitted
    try:
        job = _sbatch(JobArray(tasks), attempts, options, before)
    except HiresError as error:
        for path, attempt in attempts.items():
            leave(path, attempt, "failed", str(error))
        return submitted + [Submitted(path, None, str(error)) for path in attempts]
    for index, some in enumerate(tasks):
        for run in some:
            folder = file_names.attempt_dir(run.path, attempts[run.path])
            note_job(folder, job, index, len(some))
            submitted.append(Submitted(run.path, job_name({"job": job, "index": index}), None))
    return submitted


def _sbatch(
    array: JobArray, attempts: dict[Path, int], options: SubmitOptions, before: str | None
) -> str:
    """Writes the folder of an array and submits it; returns its number.

    Raises:
        ConfigError: Slurm refuses an option, whose line is shown.
        RunError: the folder cannot be written, or Slurm is not here.
    """
    largest = array.largest
    folder = _new_folder(largest.path.parent / FOLDER)
    lines = [
        json.dumps([_line_of(run, attempts[run.path]) for run in some]) for some in array.tasks
    ]
    write_atomically(folder / LIST, "".join(f"{line}\n" for line in lines))
    shape = job_script.ArrayShape(
        len(array.tasks), options.limit, options.exclude, largest.attempts
    )
    step = job_script.BatchStep("hires.launcher.slurm.array_task", shape)
    script = job_script.write_script(folder, largest.config, largest.ranks, options.argv, step)
    words = job_script.after(largest.config, options.after, before and f"afterany:{before}")
    job = sbatch.submit(script, words)
    note_job(folder, job, None)
    return job


def _line_of(run: FrozenRun, attempt: int) -> dict[str, Any]:
    identity = Attempt.at(file_names.attempt_dir(run.path, attempt)).id
    line = {"run": run.path.name, "attempt": attempt, "id": identity}
    return line | ({"attempts": run.attempts} if run.attempts > 1 else {})


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
