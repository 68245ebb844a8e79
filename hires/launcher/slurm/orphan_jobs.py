"""Which runs are jobs though nobody knows it? Those whose submission was not answered in time.

sbatch may die, or give up waiting, after the controller has taken the job: the attempt then says
that it failed, or nothing if the command was killed, and has no number. What tells such a job in
the queue is the script that it runs, which lies in the folder of the run, or of an array.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from hires.core.errors import RunError
from hires.core.store import file_names
from hires.core.store.attempts import latest
from hires.launcher.interface import job_of
from hires.launcher.slurm import job_arrays, job_script, scheduler

_Scripts = dict[str, dict[int | None, list[Path]]]
"""Which runs a script starts, by the element of its array."""


def orphan_jobs(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns the jobs of runs whose latest attempt has none that is known, and was not begun.

    Slurm is only asked if there are such runs with a script; no answer means no job.

    Args:
        runs: run folders.
    """
    doubtful = {run: number for run in runs if (number := _not_begun(run)) is not None}
    scripts: _Scripts = {}
    for run in doubtful:
        if (run / job_script.SCRIPT).exists():
            scripts[str(run / job_script.SCRIPT)] = {None: [run]}
    for campaign in {run.parent for run in doubtful}:
        for script, index, entry in _unanswered(campaign):
            if doubtful.get(campaign / entry.run) == entry.attempt:
                told = scripts.setdefault(str(script), {})
                told.setdefault(index, []).append(campaign / entry.run)
    found: dict[Path, str] = {}
    for name, script_text in scheduler.scripts_of_all() if scripts else ():
        index = job_of(name)["index"]
        for run in scripts.get(script_text, {}).get(index, []):
            found.setdefault(run, name)
    return found


def _not_begun(run: Path) -> int | None:
    """Returns a run's latest attempt if it was never launched and has no job; else None."""
    last = latest(run)
    if last is None or last.launched or (last.folder / file_names.JOB).exists():
        return None
    return last.number


def _unanswered(campaign: Path) -> Iterator[tuple[Path, int, job_arrays.Entry]]:
    """Yields script, element and run of all arrays of a campaign whose number is not known."""
    for path in sorted((campaign / job_arrays.FOLDER).glob(f"*/{job_arrays.LIST}")):
        if path.with_name(file_names.JOB).exists():
            continue
        with contextlib.suppress(RunError):  # a damaged list is told about elsewhere
            for index, entries in enumerate(job_arrays.read_all(path)):
                yield from ((path.with_name(job_script.SCRIPT), index, entry) for entry in entries)
