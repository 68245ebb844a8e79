"""Refuses to start a run that is under way already, in a job or as a process of some machine.

A script may be started by hand while the job that it was made for still waits or runs. So before an
attempt begins, the schedulers are queried about the jobs of attempts without ``exit.json``, and
attempts without a job are searched for signs of life.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hires.core.errors import RunError
from hires.core.store import file_names, files
from hires.core.store.attempts import Attempt, job_name
from hires.core.store.ends import End, State
from hires.launcher import interface
from hires.launcher.interface import GONE, UNKNOWN, JobStatus
from hires.launcher.launch_attempt import end_without_ranks
from hires.launcher.status.state import age_s, is_alive

_PATIENCE_S = 120.0
"""How long another process may hold the lock while it queries the scheduler."""
_STARTS_S = 5.0
"""How long it may take from the folder of an attempt to the event that its launch began."""


class UnderWayError(RunError):
    """Another job or process has the run."""


@contextlib.contextmanager
def exclusive_start(
    run: Path, job: str | None = None, submitted: int | None = None, *, closes: bool = True
) -> Iterator[None]:
    """Lets one process at a time take an attempt of a run, and only if no other has the run.

    ``job`` names this process's job, if it belongs to one, and ``submitted`` the attempt that it
    was submitted for and that was not launched yet. An UnderWayError names who has the run.
    Attempts that give no sign of life get their end if something is to begin now: ``closes``.
    """
    if not run.is_dir():  # a lock would make the folder, and no run is whole without its files
        yield
        return
    with files.lock(run / file_names.BEGIN_LOCK, f"the start of {run.name}", _PATIENCE_S):
        for why in holders([run], job, submitted).values():
            by = "" if job is None else f" by job {job}"
            raise UnderWayError(f"{run.name} is not begun{by}: {why}")
        for attempt in _silent(run) if closes else ():
            _close(attempt, job)
        yield


def _silent(run: Path) -> list[Attempt]:
    """Returns the attempts whose ranks were started, and which left no ``exit.json``."""
    every = [Attempt(run, number) for number in file_names.attempt_numbers(run)]
    return [attempt for attempt in every if attempt.launched and not attempt.has_ended]


def _close(attempt: Attempt, job: str | None) -> None:
    """Writes the end of an attempt that no job or process has, as far as it is seen.

    Ranks that are stopped or cut off, as on a laptop that sleeps, end themselves when they see it:
    they would write the same checkpoints as the attempt that begins now.
    """
    end = End(State.LOST, "it gave no sign of life when the next attempt began")
    if job is not None and attempt.job_name == job:  # Slurm does that only if a node went down
        cause = (
            f"job {job} was started again by Slurm, and the supervisor of this attempt left no "
            f"exit.json: its node went down, or it was killed"
        )
        end = End(State.FAILED, cause, "node")
    end_without_ranks(attempt.run, attempt.number, end)


def holders(
    runs: Iterable[Path], job: str | None = None, submitted: int | None = None
) -> dict[Path, str]:
    """Returns the runs that another job or process has, with its name and how to stop it in words.

    Call it within :func:`hires.core.store.campaign.starting` if the others are to be started. Of
    ``job`` and ``submitted`` see :func:`exclusive_start`.
    """
    every = {run: [Attempt(run, n) for n in file_names.attempt_numbers(run)] for run in runs}
    jobs = [a.job for some in every.values() for a in some if a.job and a.may_go_on]
    statuses = interface.job_states(each for each in jobs if job_name(each) != job)
    held: dict[Path, str] = {}
    for attempt in itertools.chain(*every.values()):
        who = _holder(attempt, job, submitted, statuses)
        if who is not None and attempt.run not in held:
            stop = f"`hires cancel {shlex.quote(str(attempt.run))}`"
            if attempt is not every[attempt.run][-1] and attempt.job_name is not None:
                launcher = interface.launcher_named(attempt.job["launcher"])
                stop = launcher.cancel_command.format(attempt.job_name)
            held[attempt.run] = (
                f"{who}; wait until that has ended, stop it with {stop}, or start this one with "
                f"another campaign=NAME"
            )
    return held


def refuse_begun(run: Path, seen: int | None) -> None:
    """Raises a RunError if another command has begun a run whose latest attempt was ``seen``."""
    last = file_names.last_number(run)
    if last != seen:
        job = None if last is None else Attempt(run, last).job_name
        by = "by another command, as" if job is None else f"job {job} has it as"
        raise RunError(
            f"{run.name} was begun meanwhile, {by} attempt a{last}; `hires status "
            f"{run.parent.name}` watches it"
        )


def _holder(
    attempt: Attempt, job: str | None, submitted: int | None, statuses: Mapping[str, JobStatus]
) -> str | None:
    """Returns which job or process has an attempt, in words; None: no other than this one."""
    name, label = attempt.job_name, f"attempt a{attempt.number}"
    if name is None:
        if attempt.exit:
            return None
        if is_alive(attempt):
            who = attempt.launched
            return f"process {who.get('pid')} on {who.get('host')} runs {label}"
        # A job starts long after the command that submitted it has made its attempt.
        if job is None and not attempt.launched and age_s(attempt) <= _STARTS_S:
            return f"{label} was just made, and its ranks are being started"
        return None
    if name == job or not attempt.may_go_on:
        return None
    status = statuses[name]
    # A job that waits with a later attempt will itself see that this one runs.
    waits = status.state == State.PENDING and (submitted is None or attempt.number <= submitted)
    if waits or status.state == State.RUNNING:
        return f"job {name} has it as {label} ({status.state})"
    if status.state == UNKNOWN and (not attempt.launched or is_alive(attempt)):
        return f"job {name} may have it as {label}, and {status.reason or 'its state is unknown'}"
    # As the scheduler of another cluster answers.
    if status.state == GONE and not attempt.has_ended and is_alive(attempt):
        return f"job {name} has it as {label}: its ranks run, though the scheduler does not list it"
    return None
