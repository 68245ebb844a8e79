"""Is a run under way already, in another job or as a process of some machine?

A script may be submitted or started by hand while the job that it was made for still waits or runs.
Before it begins an attempt it asks the scheduler about the jobs of all attempts that left no word,
and looks for signs of life of those that are no jobs.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hires.core.errors import RunError
from hires.core.ranks import process_id
from hires.core.ranks.heartbeat import FileClock, last_sign
from hires.core.store import file_names, lock
from hires.core.store.attempts import Attempt, latest
from hires.core.store.file_names import last_number
from hires.launcher import interface
from hires.launcher.interface import (
    PENDING,
    RESTARTED,
    RUNNING,
    UNKNOWN,
    JobStatus,
    job_of,
)
from hires.launcher.status.state import OLD_S

_LOCK = file_names.BEGIN_LOCK
_PATIENCE_S = 120.0
"""How long another job may take to ask the scheduler, before it is in the way for good."""

_STARTS_S = 5.0
"""How long it may take from the folder of an attempt to the event that its launch began."""


class UnderWayError(RunError):
    """Somebody else has the run."""


@contextlib.contextmanager
def alone(run: Path, job: str | None, submitted: int | None) -> Iterator[None]:
    """Lets one at a time take an attempt of a run, and only if the run is not under way.

    Args:
        run: the run folder; one that is not there yet is under way nowhere.
        job: this job, as Slurm names it; None: this process is of no job.
        submitted: the attempt that it was submitted for and that was not launched yet, if any.

    Raises:
        UnderWayError: another job or process has the run; it is named.
        RunError: another process looks at it for long.
    """
    if not run.is_dir():  # a lock would make the folder, and no run is whole without its files
        yield
        return
    with lock.waited(run / _LOCK, f"the start of {run.name}", _PATIENCE_S):
        why = _why_not(run, job, submitted)
        by = "" if job is None else f" by job {job}"
        if why is not None:
            raise UnderWayError(
                f"{run.name} is not begun{by}: {why}; wait until that has ended, or stop it with "
                f"`hires cancel`"
            )
        yield


def refuse_queued(run: Path) -> None:
    """Refuses a second submission of a run whose job waits, runs, or was queued again.

    Raises:
        RunError: names the job.
    """
    for text in queued([run]).values():
        raise RunError(text)


def refuse_begun(run: Path, seen: int | None) -> None:
    """Refuses to start a run that another command has begun since it was looked at.

    Args:
        run: the run folder.
        seen: the latest attempt that it had; None: it had none.

    Raises:
        RunError: names the attempt.
    """
    last = last_number(run)
    if last != seen:
        raise RunError(
            f"{run.name} was begun meanwhile, by another command, as attempt a{last}; `hires "
            f"status {run.parent.name}` watches it"
        )


def queued(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns why runs must not be submitted now: a job of each waits, runs or starts again."""
    runs = list(runs)
    jobs = {(run, attempt.job_name) for run in runs for attempt in _unfinished(run)}
    answers = interface.job_states(job_of(job) for _, job in jobs if job is not None)
    found = {}
    for run, job in sorted(jobs, key=str):
        answer = answers.get(job or "")
        if answer is not None and answer.state in (PENDING, RUNNING):
            found[run] = (
                f"{run.name} is job {job} already ({answer.state}); wait for it, stop it with "
                f"`{_stop_line(run, job or '')}`, or start this one with another campaign=NAME"
            )
    for launcher in interface.all_launchers():
        for run, job in launcher.orphan_jobs([run for run in runs if run not in found]).items():
            found[run] = (
                f"{run.name} is job {job} already, though sbatch did not say so in time; wait for "
                f"it, stop it with `scancel {job}`, or start this one with another campaign=NAME"
            )
    return found


def _stop_line(run: Path, job: str) -> str:
    """Returns the command that stops a job of a run.

    ``scancel`` leaves nothing behind in the run, but alone knows a job that was replaced.
    """
    last = latest(run)
    if last is not None and last.job_name == job:
        return f"hires cancel {shlex.quote(str(run))}"
    return f"scancel {job}"


def _unfinished(run: Path) -> list[Attempt]:
    """Returns the attempts that are jobs and left no exit.json, or go on as another."""
    return [a for a in _attempts(run) if (a.folder / file_names.JOB).exists() and _may_go_on(a)]


def under_way(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns which of some runs are under way, and who has them, in words; Slurm is asked once.

    Call it within :func:`hires.core.store.campaign.starting` if something is to be done with the
    others.
    """
    attempts = {run: _attempts(run) for run in runs}
    jobs = [one.job for some in attempts.values() for one in some if one.job and _may_go_on(one)]
    answers = interface.job_states(jobs) if jobs else {}
    found = {run: _has(some, None, None, answers) for run, some in attempts.items()}
    return {run: why for run, why in found.items() if why is not None}


def _why_not(run: Path, own: str | None, submitted: int | None) -> str | None:
    """Returns which other job or process has a run, in words; None if nobody has."""
    attempts = _attempts(run)
    others = [one.job for one in attempts if one.job and _may_go_on(one) and one.job_name != own]
    return _has(attempts, own, submitted, interface.job_states(others) if others else {})


def _attempts(run: Path) -> list[Attempt]:
    """Returns what the files say of all attempts of a run."""
    return [Attempt(run, number) for number in file_names.attempt_numbers(run)]


def _has(
    attempts: list[Attempt],
    own: str | None,
    submitted: int | None,
    answers: Mapping[str, JobStatus],
) -> str | None:
    """Returns which other job or process has a run, as its attempts and Slurm's answers say."""
    local = [one for one in attempts if not one.exit and not one.job]
    for attempt in local:
        if _is_alive(attempt):
            who = attempt.launched
            return f"process {who.get('pid')} on {who.get('host')} runs attempt a{attempt.number}"
        # A job starts long after the command that submitted it has made its attempt.
        if own is None and not attempt.launched and _is_young(attempt):
            return f"attempt a{attempt.number} was just made, and its ranks are being started"
    for attempt in attempts:
        name, number = attempt.job_name, attempt.number
        if name is None or name == own or not _may_go_on(attempt):
            continue
        answer = answers[name]
        # What waits with a later attempt will itself see that this one runs.
        waits = answer.state == PENDING and (submitted is None or number <= submitted)
        if waits or answer.state == RUNNING:
            return f"job {name} has it as attempt a{number} ({answer.state})"
        if answer.state == UNKNOWN and (not attempt.launched or _is_alive(attempt)):
            why = answer.reason or "Slurm does not say"
            return f"job {name} may have it as attempt a{number}, and {why}"
    return None


def _may_go_on(attempt: Attempt) -> bool:
    """Whether the job of an attempt may still run it, or the run's next one."""
    return not attempt.exit or attempt.exit.get("reason") in RESTARTED


def _is_alive(attempt: Attempt) -> bool:
    """Whether somebody runs an attempt that left no word, as far as that is seen from here."""
    if not attempt.launched:
        return False
    lives = process_id.lives(attempt.launched)
    if lives is not None:
        return lives
    return _age_s(attempt) <= OLD_S


def _is_young(attempt: Attempt) -> bool:
    """Whether whoever made an attempt may not have come to start its ranks."""
    return _age_s(attempt) <= _STARTS_S


def _age_s(attempt: Attempt) -> float:
    """Returns the seconds since an attempt's last sign of life, by the file system's clock."""
    return FileClock().now(attempt.run) - last_sign(attempt.folder)
