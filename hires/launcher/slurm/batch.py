"""Supervises the runs of a Slurm job, on its first node, where the job's script starts this module.

``python -m hires.launcher.slurm.batch RUN_DIR [ATTEMPT]`` starts the ranks of a run on all nodes,
waits, and writes ``exit.json`` and ``record.json`` as the local launcher does. When Slurm ends the
job early, the ranks save their state, the job is queued again, and its next start makes the run's
next attempt:

    Slurm: SIGUSR2 ──▶ supervisor ──SIGUSR2──▶ ranks: checkpoint, exit PREEMPTED
                       exit.json: failed, timeout | preempted
                       scontrol requeue JOB  (at most launcher.requeues time-outs)
    Slurm: starts the job again ──▶ attempt a1 resumes from the checkpoint

``... ARRAY_DIR [INDEX]`` runs one task of a job array, whose list of runs is in that folder. It
supervises a single run itself; several runs share the task, each with a supervisor of its own
(``... --packed RUN_DIR ATTEMPT``). If Slurm preempts such a job, the runs that run save their
state, and no other begins. The output of a run goes to ``job.log`` in its own folder.
``... FOLDER ATTEMPT --checkup`` starts the ranks of ``hires doctor``, which measure no steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.core import log, streams
from hires.core.errors import INTERRUPTED, PREEMPTED, HiresError, RunError
from hires.core.store import file_names, rundir, trust
from hires.core.store.attempts import Attempt
from hires.core.store.campaign import read_array
from hires.core.store.files import cannot_write
from hires.launcher.attempt_queue import AttemptQueue, Running
from hires.launcher.local.local_launcher import leave, say
from hires.launcher.slurm import allocation, scheduler
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.slurm.job_attempts import JobRun, is_restarted
from hires.launcher.slurm.job_script import BATCH, CHECKUP
from hires.launcher.supervision.interrupts import Interrupts


def main(argv: Sequence[str] | None = None, module: str = BATCH) -> int:
    """Runs the job; returns its exit code. ``module`` supervises one of several runs."""
    words = sys.argv[1:] if argv is None else list(argv)
    packed, checkup = "--packed" in words[:1], CHECKUP in words[2:]
    words = [word for word in words if word not in ("--packed", CHECKUP)]
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words[1:]):
        say("usage: python -m hires.launcher.slurm.batch RUN_DIR [ATTEMPT] | ARRAY_DIR [INDEX]")
        return 2
    log.setup()
    trust.keep_folders_private()
    number = int(words[1]) if words[1:] else None
    try:
        job = allocation.current()
        if (Path(words[0]) / file_names.POINTS).exists():
            return _run_task(Path(words[0]).absolute(), number, job, module)
        run = JobRun(rundir.frozen_folder(words[0]), job, number, is_packed=packed, checkup=checkup)
        if not packed and is_restarted() and run.is_over:
            say(f"{run.path.name} is complete: nothing is left for this start of job {job.name}")
            return 0
        return run.make_attempt(run.take_attempt())
    except HiresError as error:
        say(str(error))
        return error.exit_code


def _run_task(folder: Path, index: int | None, job: Allocation, module: str) -> int:
    if index is None:
        if job.array is None:
            raise RunError("this is no job array: name the task, as `sbatch job.sbatch 4`")
        index = job.array[1]
    tasks = read_array(folder, index)
    if not 0 <= index < len(tasks):
        raise RunError(f"{folder} has {len(tasks)} tasks, of which none is task {index}")
    entries = tasks[index]
    campaign = folder.parent.parent
    runs = [JobRun(campaign / e.run, job, e.attempt, e.attempts, len(entries)) for e in entries]
    runs = [run for run in runs if run.is_open]
    if not runs:
        say(f"nothing is left to do for job {job.name}: its runs have ended")
        return 0
    return _run_single(runs[0]) if len(entries) == 1 else _run_packed(runs, job, module)


def _run_single(run: JobRun) -> int:
    """Makes the attempts of one run, one after the other, until one fails; returns its code."""
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


def _run_packed(runs: Sequence[JobRun], job: Allocation, module: str) -> int:
    """Runs several runs; returns the exit code of the first that failed, or 0."""
    whole, failed = [], 0
    for run in runs:
        try:
            if run.needs:  # it is read before the first run starts
                whole.append(run)
        except HiresError as error:  # it does not stop the others
            say(str(error))
            failed = error.exit_code
    queue = _PackedRuns(job, whole, module)
    queue.work()
    if queue.interrupts.count:
        for run in queue.waiting:
            cause = f"job {job.name} was stopped by {queue.interrupts.name} before its turn"
            with contextlib.suppress(RunError):  # another job has it, and writes how it ends
                leave(run.path, run.take_attempt(), "cancelled", cause)
        return INTERRUPTED
    left = [run for run in whole if run not in queue.refused and run.is_open]
    left = [run for run in left if not run.is_cancelled]
    if left:
        say(f"job {job.name} is queued again: {len(left)} of its runs go on")
        scheduler.ask("scontrol", "requeue", job.name)
    return queue.code or failed


class _PackedRuns(AttemptQueue[JobRun]):
    """The runs of one job: one after the other, and side by side where they fit."""

    def __init__(self, job: Allocation, runs: Sequence[JobRun], module: str) -> None:
        super().__init__(runs, allocation.cores(job))
        self.refused: list[JobRun] = []
        """Those that this job cannot start, nor would another start of it."""
        self.code = 0
        """The first exit code that tells of a failure."""
        self._words = [module, "--packed"]

    def begin(self, task: JobRun) -> None:
        """Starts the supervisor of a run unless the run was cancelled meanwhile."""
        if task.is_cancelled:
            return
        path = task.path
        try:
            number = task.take_attempt()
            words = [*self._words, str(path), str(number)]
            self.launch(task, number, words, path / file_names.JOB_LOG)
        except RunError as error:
            say(f"{path.name}: {error}")
            self.refused.append(task)
            self.code = self.code or RunError.exit_code
        else:
            say(f"{path.name}: attempt {number} begins")

    def ended(self, run: Running[JobRun], code: int, state: str, cause: str | None) -> None:
        """Keeps the first exit code that tells of a failure."""
        say(f"{run.task.path.name}: attempt {run.attempt} ended with code {code}: {cause or state}")
        if not Attempt(run.task.path, run.attempt).exit:  # a full disk: it would never end
            self.refused.append(run.task)
        if state != "done" and not self.code:
            self.code = code if code > 0 else RunError.exit_code


if __name__ == "__main__":
    streams.secure()
    sys.exit(main())
