"""Refuses to start a run that is under way already, and cancels runs of other commands.

A script may be started by hand while the job that it was made for still waits or runs. So before an
attempt begins, the schedulers are queried about the jobs of attempts without ``exit.json``, and
attempts without a job are searched for signs of life. To cancel

a job                            request file, scheduler's cancel; a waiting attempt is closed
a process of this machine        request file, which its supervisor reads
a process of another machine     refused: only there does it show whether it still runs
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hires.core.errors import RunError
from hires.core.store import file_names, files, provenance
from hires.core.store.attempts import Attempt, job_name
from hires.core.store.ends import End, State
from hires.launcher import interface
from hires.launcher.interface import GONE, UNKNOWN, JobStatus
from hires.launcher.launch_attempt import end_without_ranks
from hires.launcher.status.state import RunState, age_s, is_alive

_PATIENCE_S = 120.0
"""How long another process may hold the lock while it queries the scheduler."""
WAIT_S = 15.0
"""How long a launcher that is cancelled may take to stop its ranks and write its end."""
_POLL_S = 0.05
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
                stop = f"`scancel {attempt.job_name}`"  # hires cancels the latest attempt alone
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


def cancel_all(states: Sequence[RunState]) -> Iterator[tuple[RunState, str, bool]]:
    """Stops runs; yields each with what was done about it, in words, and whether that worked."""
    attempts = [
        Attempt(s.path, s.attempt)
        if s.path is not None
        and s.attempt is not None
        and s.state in (State.PENDING, State.RUNNING)
        else None
        for s in states
    ]
    submitted = [one for one in attempts if one is not None and one.job_name is not None]
    why = None
    try:
        for one in submitted:  # first: an attempt that begins just now must not seem to have failed
            files.write_atomically(one.folder / file_names.CANCEL, "")
        interface.cancel_jobs([one.job for one in submitted])
    except RunError as error:  # a job that the scheduler does not cancel ends at its request
        why = f"{error}; a request to cancel it that was written stays, and ends it once it runs"
    for state, attempt in zip(states, attempts, strict=True):
        waits = state.state == State.PENDING
        try:
            if attempt is None:
                yield state, f"is {state.state}; there is nothing to cancel", True
            elif attempt.job_name is None:
                yield state, _stop_process(attempt), True
            elif why is not None:
                yield state, why, False
            else:
                cause = f"job {attempt.job_name} was cancelled"
                if waits:  # no supervisor will write its end
                    end = attempt.exit or End(State.CANCELLED)
                    end = end.cancelled(f"{cause} while it waited")
                    end.write(attempt.run, attempt.number)
                yield state, cause, True
        except RunError as error:
            yield state, str(error), False


def _stop_process(attempt: Attempt) -> str:
    """Stops the launcher of an attempt and waits until it has written its end."""
    launched = attempt.launched
    if not launched:
        return "was not started yet; there is nothing to cancel"
    process, lives = f"process {launched.get('pid')}", provenance.lives(launched)
    if lives is None:
        raise RunError(
            f"{attempt.run.name} runs as {process} on {launched.get('host')}, which cannot be seen "
            f"from here; use `hires cancel` there"
        )
    if not lives:
        return f"its {process} is gone already"
    files.write_atomically(attempt.folder / file_names.CANCEL, "")
    provenance.wake(launched)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        end = Attempt(attempt.run, attempt.number).exit
        if end:
            return f"is {end.state}: {end.cause}"
        time.sleep(_POLL_S)
    others = "" if launched.get("thread") in (None, launched.get("pid")) else ", all its other runs"
    raise RunError(
        f"{attempt.run.name}: {process} was asked to end, and has not ended within {WAIT_S:g} s; "
        f"`kill -9 {launched.get('pid')}` ends it{others} and all their ranks"
    )
