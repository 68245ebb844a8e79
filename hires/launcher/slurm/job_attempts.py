"""Decides which attempt of a run a Slurm job makes, and whether the run needs another one.

Slurm starts one job again and again: after a time limit, a preemption or the failure of a node.
Each start makes the next attempt of its run. All state is in the run folder, none in the job.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hires.core.store import attempts, file_names, records, rundir
from hires.core.store.attempts import Attempt
from hires.launcher.end_reasons import restarts
from hires.launcher.interface import note_job
from hires.launcher.local.local_launcher import leave
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.status import running_elsewhere


def is_restarted() -> bool:
    """Whether this is not the job's first start."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def attempts_of(path: Path, job: Allocation) -> list[int]:
    """Returns the attempts of a run that are this job's, in order."""
    numbers = file_names.attempt_numbers(path)
    return [n for n in numbers if Attempt(path, n).job_name == job.name]


def timeouts(path: Path, job: Allocation, before: int) -> int:
    """Returns how many attempts of a run, below a number, reached the time limit of a job."""
    own = [number for number in attempts_of(path, job) if number < before]
    return sum(Attempt(path, n).exit.get("reason") == "timeout" for n in own)


def is_fresh(path: Path, number: int) -> bool:
    """Whether an attempt exists and was not launched yet."""
    attempt = Attempt(path, number)
    return attempt.folder.is_dir() and not attempt.has_ended and not attempt.launched


def is_over(path: Path, job: Allocation) -> bool:
    """Whether a run was completed since this job has it.

    What was complete before is no reason to stop: a run may be made again.
    """
    own = attempts_of(path, job)
    return bool(own) and any(number >= own[0] for number in rundir.done_attempts(path))


def is_open(path: Path, submitted: int, job: Allocation, attempts: int = 1) -> bool:
    """Whether a run of this job still has something to do.

    That is so if it was never begun, left no ``exit.json``, or was preempted and may go on. What
    was stopped with the whole job has something to do, too: after the failure of a node Slurm
    starts the job again. What was submitted by hand runs what is not complete.

    Args:
        path: the run folder.
        submitted: the attempt that was submitted.
        job: this job.
        attempts: how many complete ones the job is to make.
    """
    own = attempts_of(path, job)
    if not own:
        return is_fresh(path, submitted) or records.done_attempt(path) is None
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
    return restarts(end.get("reason"))


def take_attempt(path: Path, job: Allocation, submitted: int | None, pack: int = 1) -> int:
    """Returns the attempt to launch: the submitted one, or the next if that was launched.

    A job that is queued again, and one that was submitted by hand, take a new attempt.

    Args:
        path: the run folder.
        job: this job.
        submitted: the attempt that was submitted, if any was.
        pack: how many runs share the job.

    Raises:
        RunError: another job has the run, or a process on some machine.
    """
    fresh = submitted if submitted is not None and is_fresh(path, submitted) else None
    with running_elsewhere.alone(path, job.name, fresh):
        if fresh is None:
            _close_silent(path, job)
        number = attempts.next_attempt(path) if fresh is None else fresh
        if Attempt(path, number).job_name != job.name:
            own, index = job.array or (job.job, None)
            note_job(file_names.attempt_dir(path, number), own, index, pack)
    return number


def say(text: str) -> None:
    """Writes a line to the log of the job."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _close_silent(path: Path, job: Allocation) -> None:
    """Writes the end of this job's latest attempt if its supervisor could not.

    Slurm starts a job again unasked only after a node of it went down. (A job that several runs
    share writes the end of a supervisor that was killed at once, so it is none of these.)
    """
    numbers = file_names.attempt_numbers(path)
    if not is_restarted() or not numbers:
        return
    last = Attempt(path, numbers[-1])
    if last.job_name == job.name and not last.has_ended:
        cause = (
            f"job {job.name} was started again by Slurm, and the supervisor of this attempt left "
            f"no exit.json: its node went down, or it was killed"
        )
        leave(path, numbers[-1], "failed", cause, "node")
