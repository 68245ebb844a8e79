"""Is a run under way already, in another job or as a process of some machine?

A script may be submitted or started by hand while the job that it was made for still waits or runs.
Before it begins an attempt it asks the scheduler about the jobs of all attempts that left no word,
and looks for signs of life of those that are no jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hires.core import lock, rundir
from hires.core.errors import RunError
from hires.launcher import scheduler, slurm, whois
from hires.launcher.attempt_files import Attempt, Clock, of_number
from hires.launcher.state import OLD_S

_LOCK = ".begin.lock"
_PATIENCE_S = 120.0
"""How long another job may take to ask the scheduler, before it is in the way for good."""


@contextlib.contextmanager
def alone(run: Path, job: str | None, submitted: int | None) -> Iterator[None]:
    """Lets one at a time take an attempt of a run, and only if the run is not under way.

    Args:
        run: the run folder.
        job: this job, as Slurm names it; None: this process is of no job.
        submitted: the attempt that it was submitted for and that was not launched yet, if any.

    Raises:
        RunError: another job or process has the run; it is named.
    """
    with lock.waited(run / _LOCK, f"the start of {run.name}", _PATIENCE_S):
        why = _why_not(run, job, submitted)
        by = "" if job is None else f" by job {job}"
        if why is not None:
            raise RunError(
                f"{run.name} is not begun{by}: {why}; wait until that has ended, or stop it with "
                f"`hires cancel`"
            )
        yield


def _why_not(run: Path, own: str | None, submitted: int | None) -> str | None:
    """Returns which other job or process has a run, in words; None if nobody has."""
    attempts = [of_number(run, number) for number in rundir.attempt_numbers(run)]
    local = [one for one in attempts if one.exit is None and one.job is None]
    for attempt in local:
        if _is_alive(attempt):
            who = attempt.launched or {}
            return f"process {who.get('pid')} on {who.get('host')} runs attempt a{attempt.number}"
    jobs = {
        attempt.number: (scheduler.job_name(attempt.job), attempt)
        for attempt in attempts
        if attempt.job is not None and _may_go_on(attempt)
    }
    others = {number: (name, one) for number, (name, one) in jobs.items() if name != own}
    answers = scheduler.ask_slurm(one.job for _, one in others.values() if one.job is not None)
    for number, (name, attempt) in others.items():
        answer = answers[name]
        # What waits with a later attempt will itself see that this one runs.
        waits = answer.state == scheduler.PENDING and (submitted is None or number <= submitted)
        if waits or answer.state == scheduler.RUNNING:
            return f"job {name} has it as attempt a{number} ({answer.state})"
        if answer.state == scheduler.UNKNOWN and (attempt.launched is None or _is_alive(attempt)):
            why = answer.reason or "Slurm does not say"
            return f"job {name} may have it as attempt a{number}, and {why}"
    return None


def _may_go_on(attempt: Attempt) -> bool:
    """Whether the job of an attempt may still run it, or the run's next one."""
    return attempt.exit is None or attempt.exit.get("reason") in slurm.GOES_ON


def _is_alive(attempt: Attempt) -> bool:
    """Whether somebody runs an attempt that left no word, as far as that is seen from here."""
    if attempt.launched is None:
        return False
    lives = whois.lives(attempt.launched)
    if lives is not None:
        return lives
    return Clock().now(attempt.path) - attempt.last_sign() <= OLD_S
