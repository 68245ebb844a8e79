"""Runs one task of a job array: ``python -m hires.launcher.slurm.array_task ARRAY_DIR``.

``arrays/N/job.sbatch`` runs it on the task's first node. It looks its runs up in the list of the
array. This very process supervises a single run; several runs share the task, see
:mod:`hires.launcher.slurm.job_packing`. The output of a run goes to ``job.log`` in its own folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.core import log
from hires.core.errors import PREEMPTED, HiresError, RunError
from hires.core.store import rundir
from hires.core.store.files import cannot_write
from hires.launcher.interface import CANCELLED
from hires.launcher.local.local_launcher import leave
from hires.launcher.slurm import allocation, job_arrays, job_script
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.slurm.batch import JobAttempt
from hires.launcher.slurm.job_arrays import ArrayEntry
from hires.launcher.slurm.job_attempts import is_open, say, take_attempt
from hires.launcher.slurm.job_packing import PackedRun, PackedRuns
from hires.launcher.supervision.interrupts import Interrupts

BATCH = "hires.launcher.slurm.batch"
"""Python module that supervises one of several runs."""


def main(argv: Sequence[str] | None = None, module: str = BATCH) -> int:
    """Runs a task; returns its exit code.

    Args:
        argv: folder of the array and, where this job is no array, the index of the task.
        module: the Python module that supervises one of several runs.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words[1:]):
        say("usage: python -m hires.launcher.slurm.array_task ARRAY_DIR [INDEX]")
        return 2
    log.setup()
    try:
        job = allocation.current()
        if not words[1:] and job.array is None:
            raise RunError("this is no job array: name the element, as `sbatch job.sbatch 4`")
        index = int(words[1]) if words[1:] or job.array is None else job.array[1]
        folder = Path(words[0]).absolute()
        campaign, entries = folder.parent.parent, job_arrays.read_entries(folder, index)
        left = [e for e in entries if is_open(campaign / e.run, e.attempt, job, e.attempts)]
        if not left:
            say(f"nothing is left to do for job {job.name}: its runs have ended")
            return 0
        if len(entries) > 1:
            return _run_packed(campaign, left, job, module)
        return _run_one(campaign / left[0].run, left[0], job)
    except HiresError as error:
        say(str(error))
        return error.exit_code


def _run_one(path: Path, entry: ArrayEntry, job: Allocation) -> int:
    """Makes the attempts of one run, one after the other, until one fails; returns its code."""
    number = take_attempt(rundir.frozen_folder(path), job, entry.attempt)
    try:
        sys.stdout.flush()
        with (path / job_script.LOG).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    except OSError as error:
        cause = str(cannot_write(path / job_script.LOG, error))
        leave(path, number, "failed", cause)
        raise RunError(f"{path.name}: {cause}") from None
    with Interrupts() as interrupts:  # an attempt handles signals itself; here those in between
        code = JobAttempt(path, number, job).run()
        while code == 0 and is_open(path, entry.attempt, job, entry.attempts):
            if interrupts.count:
                return CANCELLED
            if interrupts.requests:
                say(f"job {job.name} makes way and is queued again for the next attempt")
                allocation.ask("scontrol", "requeue", job.name)
                return PREEMPTED
            code = JobAttempt(path, take_attempt(path, job, entry.attempt), job).run()
    return code


def _run_packed(campaign: Path, entries: Sequence[ArrayEntry], job: Allocation, module: str) -> int:
    """Runs several runs; returns the exit code of the first that failed, or 0."""
    runs, failed = [], 0
    for entry in entries:
        try:
            runs.append(PackedRun.read(campaign / entry.run, entry.attempt, job))
        except HiresError as error:  # it does not stop the others
            say(str(error))
            failed = error.exit_code
    code = PackedRuns(job, runs, module).run()
    left = [run for run in runs if not run.over and is_open(run.path, run.submitted, job)]
    if code != CANCELLED and left:
        say(f"job {job.name} is queued again: {len(left)} of its runs go on")
        allocation.ask("scontrol", "requeue", job.name)
    return code or failed


if __name__ == "__main__":
    sys.exit(main())
