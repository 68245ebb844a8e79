"""Supervises the runs of a Slurm job, on its first node, where the job's script starts this module.

``python -m hires.launcher.slurm.batch RUN_DIR [ATTEMPT]`` starts the ranks of a run on all nodes,
waits, and writes ``exit.json`` and ``record.json`` as the local launcher does. When Slurm ends the
job early, the ranks save their state, the job is queued again, and its next start makes the run's
next attempt:

    Slurm: SIGUSR2 ──▶ supervisor ──SIGUSR2──▶ ranks: checkpoint, exit PREEMPTED
                       exit.json: failed, timeout | preempted
                       scontrol requeue JOB  (at most launcher.requeues time-outs)
    Slurm: starts the job again ──▶ attempt a1 resumes from the checkpoint

``... ARRAY_DIR [INDEX]`` runs one task of a job array, whose list of runs is in that folder; the
output goes to ``job.log`` of the run's own folder. ``... FOLDER ATTEMPT --checkup`` starts the
ranks of ``hires doctor``, which measure no steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.core import log, streams
from hires.core.errors import INTERRUPTED, PREEMPTED, HiresError, RunError
from hires.core.store import file_names, rundir, trust
from hires.core.store.campaign import read_task
from hires.core.store.files import cannot_write
from hires.launcher.local.local_launcher import leave, say
from hires.launcher.slurm import allocation, scheduler
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.slurm.job_attempts import JobRun, is_restarted
from hires.launcher.slurm.job_script import CHECKUP
from hires.launcher.supervision.interrupts import Interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    checkup = CHECKUP in words[2:]
    words = [word for word in words if word != CHECKUP]
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words[1:]):
        say("usage: python -m hires.launcher.slurm.batch RUN_DIR [ATTEMPT] | ARRAY_DIR [INDEX]")
        return 2
    log.setup()
    trust.keep_folders_private()
    number = int(words[1]) if words[1:] else None
    try:
        job = allocation.current()
        if (Path(words[0]) / file_names.POINTS).exists():
            return _run_task(Path(words[0]).absolute(), number, job)
        run = JobRun(rundir.frozen_folder(words[0]), job, number, checkup=checkup)
        if is_restarted() and run.is_over:
            say(f"{run.path.name} is complete: nothing is left for this start of job {job.name}")
            return 0
        return run.make_attempt(run.take_attempt())
    except HiresError as error:
        say(str(error))
        return error.exit_code


def _run_task(folder: Path, index: int | None, job: Allocation) -> int:
    """Makes the attempts of one run, one after the other, until one fails; returns its code."""
    if index is None:
        if job.array is None:
            raise RunError("this is no job array: name the task, as `sbatch job.sbatch 4`")
        index = job.array[1]
    entry = read_task(folder, index)
    run = JobRun(folder.parent.parent / entry.run, job, entry.attempt, entry.attempts)
    if not run.is_open:
        say(f"nothing is left to do for job {job.name}: its run has ended")
        return 0
    rundir.frozen_folder(run.path)
    number, output = run.take_attempt(), run.path / file_names.JOB_LOG
    try:
        sys.stdout.flush()
        with output.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    except OSError as error:
        cause = str(cannot_write(output, error))
        leave(run.path, number, "failed", cause)
        raise RunError(f"{run.path.name}: {cause}") from None
    with Interrupts() as interrupts:  # an attempt handles signals itself; here those in between
        code = run.make_attempt(number)
        while code == 0 and run.is_open:
            if interrupts.count:
                return INTERRUPTED
            if interrupts.requests:
                say(f"job {run.job.name} is preempted, and queued again for the next attempt")
                scheduler.ask("scontrol", "requeue", run.job.name)
                return PREEMPTED
            code = run.make_attempt(run.take_attempt())
    return code


if __name__ == "__main__":
    streams.secure()
    sys.exit(main())
