"""The supervisor of one task of a job array.

``python -m hires.launcher.slurm.array_task ARRAY_DIR``

``arrays/N/job.sbatch`` runs it on the element's first node. It looks up its runs in the array's
list. One run is supervised by this very process; several share the element, see
:mod:`hires.launcher.slurm.job_packing`. What a run has to say goes to the ``job.log`` in its own
folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.core import log
from hires.core.errors import PREEMPTED, HiresError, RunError
from hires.core.store import records, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write
from hires.launcher.interface import CANCELLED, RESTARTED
from hires.launcher.local.local_launcher import leave
from hires.launcher.slurm import allocation, job_arrays, job_script
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.slurm.batch import JobAttempt, attempts_of, is_fresh, number_of, timeouts
from hires.launcher.slurm.job_arrays import Entry
from hires.launcher.slurm.job_packing import Pack, Packed
from hires.launcher.supervision.interrupts import Interrupts

BATCH = "hires.launcher.slurm.batch"
"""Python module that supervises one of several runs."""


def main(argv: Sequence[str] | None = None, module: str = BATCH) -> int:
    """Runs an element; returns its exit code.

    Args:
        argv: folder of the array and, where this job is no array, the index of the element.
        module: the Python module that supervises one of several runs.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words[1:]):
        _say("usage: python -m hires.launcher.slurm.array_task ARRAY_DIR [INDEX]")
        return 2
    log.setup()
    try:
        job = allocation.current()
        if not words[1:] and job.array is None:
            raise RunError("this is no job array: name the element, as `sbatch job.sbatch 4`")
        index = int(words[1]) if words[1:] or job.array is None else job.array[1]
        folder = Path(words[0]).absolute()
        entries = job_arrays.read_element(folder, index)
        return _run(folder.parent.parent, entries, job, module)
    except HiresError as error:
        _say(str(error))
        return error.exit_code


def _run(campaign: Path, entries: Sequence[Entry], job: Allocation, module: str) -> int:
    """Runs what is left to do of an element; returns its exit code."""
    found = [one for one in entries if is_open(campaign / one.run, one.attempt, job, one.attempts)]
    if not found:
        _say(f"nothing is left to do for job {job.name}: its runs have ended")
        return 0
    if len(entries) > 1:
        return _run_pack(campaign, found, job, module)
    return _run_one(campaign / found[0].run, found[0], job)


def _run_one(path: Path, entry: Entry, job: Allocation) -> int:
    """Makes the attempts of one run, one after the other, until one is not done; returns its code.

    After one that failed come no others: they would most likely fail, too.
    """
    number = number_of(rundir.frozen_folder(path), job, entry.attempt)
    try:
        _log_to(path / job_script.LOG)
    except OSError as error:
        cause = str(cannot_write(path / job_script.LOG, error))
        leave(path, number, "failed", cause)
        raise RunError(f"{path.name}: {cause}") from None
    with Interrupts() as interrupts:  # an attempt hears signals by itself; here those in between
        code = JobAttempt(path, number, job).run()
        while code == 0 and is_open(path, entry.attempt, job, entry.attempts):
            if interrupts.count:
                return CANCELLED
            if interrupts.requests:
                _say(f"job {job.name} makes way and is queued again for the next attempt")
                allocation.ask("scontrol", "requeue", job.name)
                return PREEMPTED
            code = JobAttempt(path, number_of(path, job, entry.attempt), job).run()
    return code


def _run_pack(campaign: Path, entries: Sequence[Entry], job: Allocation, module: str) -> int:
    """Runs several runs; returns the exit code of the first that failed, or 0."""
    runs, failed = [], 0
    for entry in entries:
        try:
            runs.append(Packed.read(campaign / entry.run, entry.attempt, job))
        except HiresError as error:  # the others are as good as before
            _say(str(error))
            failed = error.exit_code
    code = Pack(job, runs, module).run()
    left = [run for run in runs if not run.over and is_open(run.path, run.submitted, job)]
    if code != CANCELLED and left:
        _say(f"job {job.name} is queued again: {len(left)} of its runs go on")
        allocation.ask("scontrol", "requeue", job.name)
    return code or failed


def is_open(path: Path, submitted: int, job: Allocation, attempts: int = 1) -> bool:
    """Whether a run of this job still has something to do.

    That is so if it was never begun, left no word, or made way and may go on. What was stopped with
    the whole job has something to do, too: after the failure of a node Slurm starts the job again.
    What was submitted by hand runs what is not complete.

    Args:
        path: the run folder.
        submitted: the attempt that was submitted.
        job: this job.
        attempts: how many complete ones the job is to make.
    """
    own = attempts_of(path, job)
    if not own:
        return is_fresh(path, submitted) or not rundir.is_complete(path)
    last = Attempt(path, own[-1])
    end = last.exit
    if not end:
        return True
    if end["state"] == "done":
        states = [Attempt(path, number).exit.get("state") for number in own]
        return states.count("done") < attempts
    if end["state"] == "cancelled":
        return not last.is_cancelled
    if end.get("reason") == "timeout":
        used = timeouts(path, job, own[-1] + 1)
        return used <= records.read_config(path).launcher.requeues
    return end.get("reason") in RESTARTED


def _log_to(path: Path) -> None:
    """Sends all further output of this process and its children to a file."""
    sys.stdout.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _say(text: str) -> None:
    """Writes a line to the array's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
