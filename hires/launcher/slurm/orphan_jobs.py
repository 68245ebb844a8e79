"""Finds the jobs of runs that have no ``job.json``, because their submission was interrupted.

sbatch may die, or stop waiting, after the controller has taken the job; the attempt then has an
``exit.json`` that says it failed, or none if the command was killed. Without the job's number the
run would be submitted twice. Such a job is found in the queue by the script that it runs, which
lies in the folder of the run, or of a job array.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from hires.core.errors import RunError
from hires.core.store import file_names
from hires.core.store.attempts import Attempt, job_in, latest
from hires.core.store.campaign import read_array
from hires.launcher.slurm import job_arrays, scheduler
from hires.launcher.slurm.job_script import note_job


def orphan_jobs(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns the jobs of runs whose latest attempt was not begun and has no ``job.json``.

    Slurm is only queried if there are such runs with a script; no answer means no job.

    Args:
        runs: run folders.
    """
    waiting: dict[Path, int] = {}
    for run in runs:
        last = latest(run)
        if last is not None and not last.launched and not (last.folder / file_names.JOB).exists():
            waiting[run] = last.number
    # By script, and for arrays by the index of the task: the runs that it starts.
    scripts: dict[tuple[str, str], list[Path]] = {}
    for run in waiting:
        if (run / file_names.JOB_SCRIPT).exists():
            scripts[str(run / file_names.JOB_SCRIPT), ""] = [run]
    for campaign in {run.parent for run in waiting}:
        for folder in _arrays(campaign):
            if (folder / file_names.JOB).exists():
                continue
            with contextlib.suppress(RunError):  # repair() reports a damaged list
                for index, entries in enumerate(read_array(folder)):
                    scripts[str(folder / file_names.JOB_SCRIPT), str(index)] = [
                        campaign / entry.run
                        for entry in entries
                        if waiting.get(campaign / entry.run) == entry.attempt
                    ]
    jobs: dict[Path, str] = {}
    for name, script in scheduler.scripts_of_all() if any(scripts.values()) else ():
        for run in scripts.get((script, name.partition("_")[2]), []):
            jobs.setdefault(run, name)
    return jobs


def repair(campaign: Path) -> Iterator[str]:
    """Writes ``job.json`` of attempts whose array has one, if its submission was interrupted.

    What is damaged is left as it is.

    Args:
        campaign: folder of the campaign.

    Yields:
        What could not be read, in words.

    Raises:
        RunError: an attempt cannot be written to.
    """
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
        for index, entries in enumerate(tasks):
            for entry in entries:
                attempt = Attempt(campaign / entry.run, entry.attempt)
                is_noted = attempt.has_ended or (attempt.folder / file_names.JOB).exists()
                if entry.id is not None and entry.id == attempt.id and not is_noted:
                    note_job(attempt.folder, str(job["job"]), index, len(entries))


def _arrays(campaign: Path) -> list[Path]:
    lists = (campaign / job_arrays.FOLDER).glob(f"*/{file_names.POINTS}")
    return sorted(path.parent for path in lists)
