"""How do many frozen runs become few Slurm job arrays?

Runs that want the same of Slurm become the elements of one array, as long as the cluster allows.
An array has a folder below its campaign, ``arrays/0``, with ``job.sbatch``, which may be submitted
by hand too, and ``points.jsonl``: line k says which runs element k starts, and as which attempts.
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
from hires.core.store import attempts, file_names, reading, rundir
from hires.core.store.files import cannot_write, make_folder, write_atomically
from hires.launcher.interface import FrozenRun, SubmitOptions, Submitted, job_name
from hires.launcher.local import local_launcher
from hires.launcher.slurm import allocation, job_script, sbatch

FOLDER = "arrays"
"""Folder of all arrays, below that of their campaign."""
LIST = file_names.POINTS
MAX_SIZE = 1001
"""Elements of an array where Slurm does not say how many it allows: its own default."""


@dataclass(frozen=True)
class Array:
    """Runs that are submitted together."""

    elements: list[list[FrozenRun]]
    """The runs of each element, one after the other."""

    @property
    def largest(self) -> FrozenRun:
        """The run with most ranks, for which every element is sized."""
        return max((run for some in self.elements for run in some), key=lambda run: run.ranks)


class Entry(NamedTuple):
    """A run of an element."""

    run: str
    """Name of its folder, below that of the campaign."""
    attempt: int
    """The attempt that was submitted."""
    id: str | None = None
    """What tells this attempt from one of the same number in a folder that was made anew."""
    attempts: int = 1
    """How many complete attempts the element is to make."""


def submit_all(
    runs: Sequence[FrozenRun], options: SubmitOptions, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Submitted]:
    """Submits runs, and yields what became of each; one that fails does not stop the others.

    Args:
        runs: each with a folder and no attempt under way.
        options: what holds for all of them.
        stopped: asked before every array; if it is true, no more are submitted.
    """
    arrays = split(runs, max_size())
    lanes = min(options.limit or len(arrays), len(arrays))
    last: list[str | None] = [None] * lanes
    for number, array in enumerate(arrays):
        if stopped():
            why = "it was cancelled before it was submitted"
            yield from (Submitted(run.path, None, why) for some in array.elements for run in some)
            continue
        lane = number % lanes
        # Slurm limits each array by itself, so arrays share the limit and those beyond it wait.
        share = _share(options.limit, lane, lanes)
        before = None if options.limit is None else last[lane]
        found = _submit(array, dataclasses.replace(options, limit=share), before)
        last[lane] = next((one.job.partition("_")[0] for one in found if one.job), last[lane])
        yield from found


def split(runs: Sequence[FrozenRun], most: int) -> list[Array]:
    """Returns runs as arrays of at most so many elements, in the order of their first run."""
    alike: dict[str, list[FrozenRun]] = {}
    for run in runs:
        alike.setdefault(_wants(run), []).append(run)
    arrays = []
    for some in alike.values():
        pack = some[0].config.launcher.pack
        elements = [some[first : first + pack] for first in range(0, len(some), pack)]
        arrays += [Array(elements[first : first + most]) for first in range(0, len(elements), most)]
    return arrays


def read_element(folder: Path, index: int) -> list[Entry]:
    """Returns the runs of an element.

    Args:
        folder: of the array.
        index: of the element.

    Raises:
        RunError: the list cannot be read, or has no such element.
    """
    path = folder / LIST
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        if not 0 <= index < len(lines):
            raise RunError(f"{path} has {len(lines)} lines, of which none is element {index}")
        return _entries(lines[index])
    except (OSError, *_DAMAGED) as error:
        raise RunError(f"{path} cannot be read ({error}); submit the points again") from None


def read_all(path: Path) -> list[list[Entry]]:
    """Returns the runs of all elements.

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


_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What comes of reading a line of a list that is damaged."""


def _entries(line: str) -> list[Entry]:
    """Returns the runs that a line of a list names."""
    return [
        Entry(str(one["run"]), int(one["attempt"]), one.get("id"), int(one.get("attempts", 1)))
        for one in json.loads(line)
    ]


def mend(campaign: Path) -> Iterator[str]:
    """Tells attempts which element they are, if the command that submitted them was killed before.

    Otherwise nobody would know that they are in the queue, and they would be submitted again. What
    is damaged is left as it is.

    Args:
        campaign: folder of the campaign.

    Yields:
        What could not be read, in words.

    Raises:
        RunError: an attempt cannot be written to.
    """
    for path in sorted((campaign / FOLDER).glob(f"*/{LIST}")):
        told = reading.read_json(path.with_name(file_names.JOB), [])
        if not told:
            continue
        try:
            job, elements = str(told["job"]), read_all(path)
        except KeyError:
            yield f"{path.with_name(file_names.JOB)} is damaged: the job of its runs is not known"
            continue
        except RunError as error:
            yield str(error)
            continue
        for index, entries in enumerate(elements):
            for entry in entries:
                folder = file_names.attempt_dir(campaign / entry.run, entry.attempt)
                known = (folder / file_names.JOB).exists() or (folder / file_names.EXIT).exists()
                same = entry.id is not None and attempts.id_of(folder) == entry.id
                if same and not known:
                    job_script.note_job(folder, job, index, len(entries))


def max_size() -> int:
    """Returns how many elements an array may have: the largest index is one less."""
    try:
        text = allocation.ask("scontrol", "show", "config")
    except RunError:
        return MAX_SIZE  # if Slurm is not here at all, sbatch will say so
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return max(1, int(found[1])) if found else MAX_SIZE


def _wants(run: FrozenRun) -> str:
    """Returns what a run asks of Slurm; runs of which it is equal may share an array."""
    config = run.config
    ranks = run.ranks if config.launcher.pack == 1 else None
    sections = [dataclasses.asdict(one) for one in (config.launcher, config.cluster)]
    return json.dumps([str(run.path.parent), ranks, run.attempts, *sections])


def _share(limit: int | None, lane: int, lanes: int) -> int | None:
    """Returns how many elements of a lane may run at once.

    >>> [_share(5, lane, 3) for lane in range(3)]
    [2, 2, 1]
    """
    return None if limit is None else limit // lanes + (lane < limit % lanes)


def _submit(array: Array, options: SubmitOptions, before: str | None) -> list[Submitted]:
    """Submits one array, after another one if that is given; returns what became of its runs."""
    attempts: dict[Path, int] = {}
    found = []
    for run in (run for some in array.elements for run in some):
        try:
            attempts[run.path] = rundir.start_attempt(run.path, run.argv).attempt
        except RunError as error:
            found.append(Submitted(run.path, None, str(error)))
    elements = [[run for run in some if run.path in attempts] for some in array.elements]
    elements = [some for some in elements if some]
    if not elements:
        return found
    try:
        job = _sbatch(Array(elements), attempts, options, before)
    except HiresError as error:
        for path, attempt in attempts.items():
            local_launcher.leave(path, attempt, "failed", str(error))
        return found + [Submitted(path, None, str(error)) for path in attempts]
    for index, some in enumerate(elements):
        for run in some:
            folder = file_names.attempt_dir(run.path, attempts[run.path])
            job_script.note_job(folder, job, index, len(some))
            found.append(Submitted(run.path, job_name({"job": job, "index": index}), None))
    return found


def _sbatch(
    array: Array, attempts: dict[Path, int], options: SubmitOptions, before: str | None
) -> str:
    """Writes the folder of an array and submits it; returns its number.

    Raises:
        ConfigError: Slurm refuses an option, whose line is shown.
        RunError: the folder cannot be written, or Slurm is not here.
    """
    largest = array.largest
    folder = _new_folder(largest.path.parent / FOLDER)
    lines = [
        json.dumps([_told(run, attempts[run.path]) for run in some]) for some in array.elements
    ]
    write_atomically(folder / LIST, "".join(f"{line}\n" for line in lines))
    elements = job_script.Elements(
        len(array.elements), options.limit, options.exclude, largest.attempts
    )
    step = job_script.Step("hires.launcher.slurm.array_task", elements)
    script = job_script.write_script(folder, largest.config, largest.ranks, options.argv, step)
    words = job_script.after(largest.config, options.after, before and f"afterany:{before}")
    job = sbatch.submit(script, words)
    job_script.note_job(folder, job, None)
    return job


def _told(run: FrozenRun, attempt: int) -> dict[str, Any]:
    """Returns what the list of an array says of one run."""
    found = attempts.id_of(file_names.attempt_dir(run.path, attempt))
    told = {"run": run.path.name, "attempt": attempt, "id": found}
    return told | ({"attempts": run.attempts} if run.attempts > 1 else {})


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
