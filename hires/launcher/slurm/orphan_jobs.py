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
from hires.core.store import file_names, reading
from hires.core.store.attempts import Attempt, latest
from hires.launcher.interface import job_of, note_job
from hires.launcher.slurm import job_arrays, job_script, scheduler
from hires.launcher.slurm.job_arrays import ArrayEntry


def orphan_jobs(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns the jobs of runs whose latest attempt was not begun and has no ``job.json``.

    Slurm is only queried if there are such runs with a script; no answer means no job.

    Args:
        runs: run folders.
    """
    waiting = {run: number for run in runs if (number := _not_begun(run)) is not None}
    # By script, and for arrays by task: the runs that it starts.
    scripts: dict[str, dict[int | None, list[Path]]] = {}
    for run in waiting:
        if (run / job_script.SCRIPT).exists():
            scripts[str(run / job_script.SCRIPT)] = {None: [run]}
    for campaign in {run.parent for run in waiting}:
        for script, index, entry in _arrays_without_job(campaign):
            if waiting.get(campaign / entry.run) == entry.attempt:
                tasks = scripts.setdefault(str(script), {})
                tasks.setdefault(index, []).append(campaign / entry.run)
    jobs: dict[Path, str] = {}
    for name, script_text in scheduler.scripts_of_all() if scripts else ():
        for run in scripts.get(script_text, {}).get(job_of(name)["index"], []):
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
    for path in _lists(campaign):
        array = reading.read_json(path.with_name(file_names.JOB), [])
        if not array:
            continue
        try:
            job, tasks = str(array["job"]), job_arrays.read_all(path)
        except KeyError:
            yield f"{path.with_name(file_names.JOB)} is damaged: the job of its runs is not known"
            continue
        except RunError as error:
            yield str(error)
            continue
        for index, entries in enumerate(tasks):
            for entry in entries:
                folder = file_names.attempt_dir(campaign / entry.run, entry.attempt)
                known = (folder / file_names.JOB).exists() or (folder / file_names.EXIT).exists()
                same = entry.id is not None and Attempt.at(folder).id == entry.id
                if same and not known:
                    note_job(folder, job, index, len(entries))


def _not_begun(run: Path) -> int | None:
    """Returns a run's latest attempt if it was never launched and has no job; else None."""
    last = latest(run)
    if last is None or last.launched or (last.folder / file_names.JOB).exists():
        return None
    return last.number


def _arrays_without_job(campaign: Path) -> Iterator[tuple[Path, int, ArrayEntry]]:
    """Yields script, task and run of all arrays of a campaign whose number is not known."""
    for path in _lists(campaign):
        if not path.with_name(file_names.JOB).exists():
            with contextlib.suppress(RunError):  # repair() reports a damaged list
                for index, entries in enumerate(job_arrays.read_all(path)):
                    for entry in entries:
                        yield path.with_name(job_script.SCRIPT), index, entry


def _lists(campaign: Path) -> list[Path]:
    return sorted((campaign / job_arrays.FOLDER).glob(f"*/{job_arrays.LIST}"))
