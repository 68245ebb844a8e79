"""Refuses to start a run that is under way already, in a job or as a process of some machine.

A script may be submitted or started by hand while the job that it was made for still waits or runs.
Before an attempt begins, the schedulers are queried about the jobs of all attempts without
``exit.json``, and attempts without a job are searched for signs of life.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hires.core.errors import RunError
from hires.core.ranks.heartbeat import FileClock, last_sign
from hires.core.store import file_names, files, provenance
from hires.core.store.attempts import Attempt, latest
from hires.core.store.file_names import last_number
from hires.launcher import interface
from hires.launcher.interface import PENDING, RUNNING, UNKNOWN, JobStatus
from hires.launcher.status.state import OLD_S, may_restart

_LOCK = file_names.BEGIN_LOCK
_PATIENCE_S = 120.0
"""How long another process may hold the lock while it queries the scheduler."""
_STARTS_S = 5.0
"""How long it may take from the folder of an attempt to the event that its launch began."""


class UnderWayError(RunError):
    """Another job or process has the run."""


@contextlib.contextmanager
def alone(run: Path, job: str | None, submitted: int | None) -> Iterator[None]:
    """Lets one process at a time take an attempt of a run, and only if no other has the run.

    Args:
        run: the run folder; one that does not exist yet is under way nowhere.
        job: name of this job; None: this process belongs to no job.
        submitted: the attempt that it was submitted for and that was not launched yet, if any.

    Raises:
        UnderWayError: another job or process has the run; it is named.
        RunError: another process holds the lock for long.
    """
    if not run.is_dir():  # a lock would make the folder, and no run is whole without its files
        yield
        return
    with files.wait_for_lock(run / _LOCK, f"the start of {run.name}", _PATIENCE_S):
        attempts = _attempts(run)
        others = [a.job for a in attempts if a.job and may_restart(a) and a.job_name != job]
        why = _owner(attempts, job, submitted, interface.job_states(others))
        by = "" if job is None else f" by job {job}"
        if why is not None:
            raise UnderWayError(
                f"{run.name} is not begun{by}: {why}; wait until that has ended, or stop it with "
                f"`hires cancel`"
            )
        yield


def under_way(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns the runs that are under way, with who has them in words.

    Call it within :func:`hires.core.store.campaign.starting` if the others are to be started.
    """
    attempts = {run: _attempts(run) for run in runs}
    jobs = [a.job for some in attempts.values() for a in some if a.job and may_restart(a)]
    statuses = interface.job_states(jobs)
    owners = {run: _owner(some, None, None, statuses) for run, some in attempts.items()}
    return {run: owner for run, owner in owners.items() if owner is not None}


def queued(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns why runs must not be submitted now: a job of each waits, runs or starts again."""
    runs = list(runs)
    jobs = [
        (attempt.job_name, run, attempt.job)
        for run in runs
        for attempt in _attempts(run)
        if attempt.job_name is not None and may_restart(attempt)
    ]
    statuses = interface.job_states(job for _, _, job in jobs)
    refused = {}
    for name, run, _ in sorted(jobs, key=lambda job: (str(job[1]), job[0])):
        if statuses[name].state in (PENDING, RUNNING):
            refused[run] = (
                f"{run.name} is job {name} already ({statuses[name].state}); wait for it, stop it "
                f"with `{_stop_command(run, name)}`, or start this one with another campaign=NAME"
            )
    for launcher in interface.all_launchers():
        for run, name in launcher.orphan_jobs([r for r in runs if r not in refused]).items():
            refused[run] = (
                f"{run.name} is job {name} already, though sbatch did not say so in time; wait for "
                f"it, stop it with `scancel {name}`, or start this one with another campaign=NAME"
            )
    return refused


def refuse_queued(run: Path) -> None:
    """Refuses a second submission of a run whose job waits, runs, or was queued again.

    Raises:
        RunError: names the job.
    """
    for text in queued([run]).values():
        raise RunError(text)


def refuse_begun(run: Path, seen: int | None) -> None:
    """Refuses to start a run that another command has begun since its state was read.

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


def _attempts(run: Path) -> list[Attempt]:
    return [Attempt(run, number) for number in file_names.attempt_numbers(run)]


def _stop_command(run: Path, job: str) -> str:
    """Returns the command that stops a job of a run.

    ``scancel`` leaves nothing behind in the run, but alone reaches a job that was replaced.
    """
    last = latest(run)
    if last is not None and last.job_name == job:
        return f"hires cancel {shlex.quote(str(run))}"
    return f"scancel {job}"


def _owner(
    attempts: Sequence[Attempt],
    own: str | None,
    submitted: int | None,
    statuses: Mapping[str, JobStatus],
) -> str | None:
    """Returns which other job or process has a run, in words; None: no other."""
    for attempt in attempts:
        if attempt.exit or attempt.job:
            continue
        if _is_alive(attempt):
            who = attempt.launched
            return f"process {who.get('pid')} on {who.get('host')} runs attempt a{attempt.number}"
        # A job starts long after the command that submitted it has made its attempt.
        if own is None and not attempt.launched and _age_s(attempt) <= _STARTS_S:
            return f"attempt a{attempt.number} was just made, and its ranks are being started"
    for attempt in attempts:
        name, number = attempt.job_name, attempt.number
        if name is None or name == own or not may_restart(attempt):
            continue
        status = statuses[name]
        # A job that waits with a later attempt will itself see that this one runs.
        waits = status.state == PENDING and (submitted is None or number <= submitted)
        if waits or status.state == RUNNING:
            return f"job {name} has it as attempt a{number} ({status.state})"
        if status.state == UNKNOWN and (not attempt.launched or _is_alive(attempt)):
            why = status.reason or "Slurm does not say"
            return f"job {name} may have it as attempt a{number}, and {why}"
    return None


def _is_alive(attempt: Attempt) -> bool:
    """Whether an attempt without ``exit.json`` runs, as far as that is seen from here."""
    if not attempt.launched:
        return False
    lives = provenance.lives(attempt.launched)
    return _age_s(attempt) <= OLD_S if lives is None else lives


def _age_s(attempt: Attempt) -> float:
    """Returns the seconds since the last sign of life, by the file system's clock."""
    return FileClock().now(attempt.run) - last_sign(attempt.folder)
