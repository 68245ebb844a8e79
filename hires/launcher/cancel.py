"""How is a run stopped that somebody else started? Its launcher is asked, or its scheduler.

The launcher's process is the one that the attempt wrote down, on this machine: it stops the ranks
and leaves ``exit.json``, as after Ctrl-C. Nobody else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.ranks import process_id
from hires.core.store import file_names
from hires.core.store.attempts import Attempt, latest
from hires.core.store.file_names import attempt_dir
from hires.core.store.files import write_atomically
from hires.launcher.interface import Job, cancel_jobs, job_name
from hires.launcher.status.run_state import PENDING, RUNNING, RunState
from hires.launcher.status.state import goes_on
from hires.launcher.supervision.exit_record import leave_cancelled

WAIT_S = 15.0
"""How long a launcher may take to stop its ranks and say so."""
_POLL_S = 0.05


def cancel_all(
    states: Sequence[RunState], cancel_jobs: Callable[[list[Job]], None] = cancel_jobs
) -> Iterator[tuple[RunState, str, bool]]:
    """Stops runs; yields each with what was done about it, in words, and whether that worked.

    Args:
        states: how the runs are doing.
        cancel_jobs: cancels a scheduler's jobs.
    """
    live = [state for state in states if _is_live(state)]
    jobs = {id(state): _job(state) for state in live}
    whole = _whole_jobs(live, jobs)
    asked = [_folder(s) for s in live if (job := jobs[id(s)]) and job_name(job) in whole]
    try:
        for folder in asked:  # first: an attempt that begins just now must not seem to have failed
            write_atomically(folder / file_names.CANCEL, "")
        if whole:
            cancel_jobs(list(whole.values()))
        why = None
    except RunError as error:
        why = str(error)
        for folder in asked:
            with contextlib.suppress(OSError):
                (folder / file_names.CANCEL).unlink()
    for state in states:
        job = jobs.get(id(state))
        try:
            if job is None:
                yield state, _cancel_here(state), True
            elif job_name(job) not in whole:
                yield state, _ask(state, job), True
            elif why is not None:
                yield state, why, False
            else:
                yield state, _cancelled(state, job), True
        except RunError as error:
            yield state, str(error), False


def _is_live(state: RunState) -> bool:
    """Whether a run waits or runs, and was begun."""
    known = state.path is not None and state.attempt is not None
    return known and state.state in (PENDING, RUNNING)


def _folder(state: RunState) -> Path:
    """Returns the folder of the attempt that is under way."""
    assert state.path is not None
    assert state.attempt is not None
    return attempt_dir(state.path, state.attempt)


def _job(state: RunState) -> Job | None:
    """Returns the job of a run, if it has one."""
    return Attempt.at(_folder(state)).job or None


def _whole_jobs(states: Sequence[RunState], jobs: dict[int, Job | None]) -> dict[str, Job]:
    """Returns the jobs, by name, that serve no other run which is under way."""
    runs: dict[str, list[Path]] = {}
    found: dict[str, Job] = {}
    for state in states:
        job = jobs[id(state)]
        if job is not None and state.path is not None:
            found[job_name(job)] = job
            runs.setdefault(job_name(job), []).append(state.path)
    return {
        name: job
        for name, job in found.items()
        if len(runs[name]) >= (job.get("pack") or 1)
        or all(path in runs[name] for path in _mates(runs[name][0], job))
    }


def _mates(run: Path, job: Job) -> Iterator[Path]:
    """Yields the runs of a campaign that share a job, and run in it, wait for it or go on in it."""
    for folder in run.parent.iterdir():
        last = latest(folder)
        if last is not None and last.job_name == job_name(job) and goes_on(last):
            yield folder


def _cancelled(state: RunState, job: Job) -> str:
    """Returns what to say of a run whose job was cancelled, and writes its end if nobody will."""
    name = job_name(job)
    if state.state == PENDING:
        _leave_cancelled(state, f"job {name} was cancelled while it waited")
    return f"job {name} was cancelled"


def _ask(state: RunState, job: Job) -> str:
    """Tells one of several runs that share a job to end; returns that in words."""
    folder, name = _folder(state), job_name(job)
    write_atomically(folder / file_names.CANCEL, "")
    if state.state == PENDING:
        _leave_cancelled(state, f"cancelled while it waited for its turn in job {name}")
        return f"will not be begun; the other runs of job {name} go on"
    return f"was told to end; the other runs of job {name} go on"


def _cancel_here(state: RunState) -> str:
    """Stops a run that is no job; returns what was done about it.

    Raises:
        RunError: it runs and cannot be stopped from here.
    """
    if not _is_live(state):
        return f"is {state.state}; there is nothing to cancel"
    launched = Attempt.at(_folder(state)).launched
    if not launched:
        return "was not started yet; there is nothing to cancel"
    return _stop(launched, _folder(state))


def _leave_cancelled(state: RunState, cause: str) -> None:
    """Writes the end of a run that waits, as nobody else will."""
    assert state.path is not None
    assert state.attempt is not None
    leave_cancelled(state.path, state.attempt, cause)


def _stop(launched: dict[str, Any], folder: Path) -> str:
    """Stops the launcher of an attempt and waits until it has said so."""
    pid, host = launched.get("pid"), launched.get("host")
    if not _signal(launched):
        if process_id.lives(launched) is None:
            raise RunError(
                f"{folder.parent.name} runs as process {pid} on {host}, which cannot be seen from "
                f"here; use `hires cancel` there"
            )
        return f"its process {pid} is gone already"
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        end = Attempt.at(folder).exit
        if end:
            return f"is {end.get('state')}: {end.get('cause')}"
        time.sleep(_POLL_S)
    return f"process {pid} was told to stop, and has not said so within {WAIT_S:g} s"


def _signal(launched: dict[str, Any]) -> bool:
    """Sends SIGTERM to a launcher; returns whether it is surely that process."""
    pid = launched.get("pid")
    if not isinstance(pid, int) or not process_id.is_here(launched):
        return False
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)  # from here on the number cannot come to mean another one
        try:
            if process_id.lives(launched):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                return True
        except PermissionError:
            raise RunError(f"process {pid} belongs to another user, who must cancel it") from None
        finally:
            os.close(handle)
    return False
