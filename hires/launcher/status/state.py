"""Determines the state of runs from their files, their process if it is here, and their scheduler.

What is found first counts:

    exit.json of the latest attempt          done, failed, cancelled; pending if its job restarts
    job.json: the scheduler's answer         pending, running, cancelled, failed, lost
    the process that started the ranks       running, lost, if it is one of this machine
    the heartbeats                           running; lost if older than OLD_S

A missing process, job or heartbeat alone never marks a run as lost: it is looked at a second time,
and heartbeats are compared with the file system's own clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.ranks.heartbeat import FileClock, last_sign
from hires.core.store import file_names, provenance, reading
from hires.core.store.attempts import Attempt, latest
from hires.core.store.file_names import attempt_dir, attempt_numbers
from hires.core.store.run_index import write_cancelled
from hires.launcher import interface
from hires.launcher.end_reasons import JOB_ENDS, restarts
from hires.launcher.interface import ENDED, GONE, UNKNOWN, Job, JobStatus
from hires.launcher.status.missing_repeats import Repeats
from hires.launcher.status.run_state import (
    CANCELLED,
    DONE,
    FAILED,
    LOST,
    PENDING,
    RUNNING,
    STATES,
    RunState,
    config_numbers,
    with_damage,
    with_progress,
)

OLD_S = 60.0
"""A heartbeat of this age has stopped: twelve beats."""
AGAIN_S = 1.0
"""What looks lost is looked at again after so long: its exit.json may be on its way."""
Ask = Callable[[Iterable[Job]], dict[str, JobStatus]]
"""Returns the state of jobs, by name."""


def states(paths: Sequence[Path], ask: Ask = interface.job_states) -> list[RunState]:
    """Returns the states of runs, in the order given.

    The end of a job that was cancelled without an exit.json is written: Slurm soon forgets it.

    Args:
        paths: run folders.
        ask: queries the schedulers; it is called only if some attempt is a job.
    """
    found = _look(paths, ask)
    doubtful = [index for index, state in enumerate(found) if _is_doubtful(state)]
    if doubtful:
        time.sleep(AGAIN_S)
        again = _look([paths[index] for index in doubtful], ask)
        for index, state in zip(doubtful, again, strict=True):
            found[index] = state
            _keep(state)
    return found


def state_of(path: Path, ask: Ask = interface.job_states) -> RunState:
    """Returns the state of one run."""
    return states([path], ask)[0]


def _look(paths: Sequence[Path], ask: Ask) -> list[RunState]:
    attempts = [latest(path) for path in paths]
    jobs = [a.job for a in attempts if a is not None and a.job and may_restart(a)]
    answers = ask(jobs) if jobs else {}
    clock, repeats = FileClock(), Repeats()
    found = []
    for path, attempt in zip(paths, attempts, strict=True):
        state = with_progress(_judged(path, attempt, answers, clock), attempt)
        if state.state == DONE:
            wanted, missing = repeats.wanted(path), repeats.missing(path)
            state = replace(state, repeats=wanted, missing=missing)
        found.append(with_damage(state, attempt))
    return found


def may_restart(attempt: Attempt) -> bool:
    """Whether an attempt has not ended, or ended for a reason after which jobs start again."""
    return not attempt.exit or restarts(attempt.exit.get("reason"))


def goes_on(attempt: Attempt) -> bool:
    """Whether an attempt has not ended, or its job may start the run again."""
    return may_restart(attempt) and not _is_used_up(attempt)


def _is_used_up(attempt: Attempt) -> bool:
    """Whether a run that shares its job reached the time limit so often that only others go on."""
    job, end = attempt.job, attempt.exit
    if job.get("pack", 1) == 1 or end.get("reason") != "timeout":
        return False
    ends = 0
    for number in attempt_numbers(attempt.run):
        other = Attempt(attempt.run, number)
        same = other.job.get("job") == job.get("job")
        ends += same and other.exit.get("reason") == "timeout"
    return ends > config_numbers(attempt.run).get("requeues", 0)


def _is_doubtful(state: RunState) -> bool:
    """Whether a run looks lost for the first time, or cancelled without an ``exit.json``."""
    if _has_exit(state):
        return False
    if state.state == LOST:
        return state.heartbeat_s is None or state.heartbeat_s <= OLD_S
    return state.state == CANCELLED


def _has_exit(state: RunState) -> bool:
    """Whether a run has no attempt, or its latest one left ``exit.json``."""
    if state.path is None or state.attempt is None:
        return True
    return (attempt_dir(state.path, state.attempt) / file_names.EXIT).exists()


def _keep(state: RunState) -> None:
    """Writes the end of a run whose job was cancelled."""
    if state.state != CANCELLED or _has_exit(state):
        return
    assert state.path is not None
    assert state.attempt is not None
    with contextlib.suppress(RunError):  # the run of another user is only shown
        write_cancelled(state.path, state.attempt, str(state.cause))


def _judged(
    path: Path, attempt: Attempt | None, answers: dict[str, JobStatus], clock: FileClock
) -> RunState:
    """Returns a run's state without its progress."""
    state = RunState(path, path.name, path.parent.name, PENDING)
    if attempt is None:
        return replace(state, cause="no attempt was begun")
    state = replace(state, attempt=attempt.number)
    name = attempt.job_name
    answer = answers.get(name or "", JobStatus(UNKNOWN))
    if attempt.exit:
        lives = answer.state in (PENDING, RUNNING)
        if lives and goes_on(attempt):
            why = f"queued again after {attempt.exit['reason']}"
            cause = f"{why} ({answer.reason})" if answer.reason else why
            return replace(state, cause=cause, expected=answer.expected, job=name)
        return _ended(state, attempt.exit)
    if attempt.job:
        return _as_job(replace(state, job=name), attempt, answer, clock)
    if not attempt.launched:
        age_s = _age(attempt, clock)
        if attempt.damaged:
            return replace(state, state=LOST, heartbeat_s=age_s)
        if age_s <= OLD_S:
            return replace(state, cause="its ranks were not started yet")
        cause = "the launcher exited before it started any rank"
        return replace(state, state=LOST, cause=cause, heartbeat_s=age_s)
    return _as_process(state, attempt, attempt.launched, clock)


def _ended(state: RunState, end: dict[str, Any]) -> RunState:
    """Returns the state that an ``exit.json`` tells, unless an earlier attempt was complete."""
    said, reason, cause = end.get("state"), end.get("reason"), end.get("cause")
    if said != DONE and state.path is not None:
        record = reading.read_json(state.path / file_names.RECORD, [])
        if record.get("state") == DONE and type(record.get("attempt")) is int:
            return replace(state, state=DONE, attempt=record["attempt"])
    known = said if said in STATES else FAILED
    return replace(state, state=known, reason=reason, cause=cause)


def _as_process(
    state: RunState, attempt: Attempt, launched: dict[str, Any], clock: FileClock
) -> RunState:
    """Returns the state of an attempt without ``exit.json`` that a process started."""
    age_s = _age(attempt, clock)
    state = replace(state, state=RUNNING, heartbeat_s=age_s)
    lives = provenance.lives(launched)
    if lives is False:
        who = f"its process {launched.get('pid')} on {launched.get('host')}"
        return replace(state, state=LOST, cause=f"{who} is gone, and left no exit.json")
    if lives is None and age_s > OLD_S:
        return replace(state, state=LOST, cause=_silent(age_s, launched.get("host")))
    return state


def _as_job(state: RunState, attempt: Attempt, answer: JobStatus, clock: FileClock) -> RunState:
    """Returns the state of an attempt without ``exit.json`` that is a job."""
    began = bool(attempt.launched)
    age_s = _age(attempt, clock)
    beats = began and age_s <= OLD_S
    if began:
        state = replace(state, heartbeat_s=age_s)
    if answer.state == PENDING:
        return replace(state, cause=answer.reason, expected=answer.expected)
    if answer.state == RUNNING:
        if not began and attempt.job.get("pack", 1) > 1:
            return replace(state, cause=f"waits for its turn in job {state.job}, which runs")
        return replace(state, state=RUNNING, cause=None if beats or not began else _silent(age_s))
    ended = answer.state == ENDED
    gone = answer.state == GONE and not beats
    if (ended or gone) and attempt.is_cancelled:
        cause = f"job {state.job} was cancelled, and left no exit.json"
        return replace(state, state=CANCELLED, cause=cause)
    if ended and answer.reason in JOB_ENDS:
        known, reason = JOB_ENDS[answer.reason]
        cause = f"job {state.job} ended with {answer.reason}, and left no exit.json"
        return replace(state, state=known, reason=reason, cause=cause)
    if beats:
        return replace(state, state=RUNNING)
    if answer.state == UNKNOWN:
        why = answer.reason or "the scheduler does not answer"
        if began:
            return replace(state, state=LOST, cause=f"{_silent(age_s)}; {why}")
        return replace(state, cause=why)
    if not began and age_s <= OLD_S:
        return replace(state, cause="the scheduler does not list it yet")
    how = "has ended" if ended else "is not known to the scheduler"
    why = "left no exit.json" if began else "never began: it was cancelled there, or died at once"
    return replace(state, state=LOST, cause=f"job {state.job} {how}, and {why}")


def _age(attempt: Attempt, clock: FileClock) -> float:
    return max(0.0, clock.now(attempt.run) - last_sign(attempt.folder))


def _silent(age_s: float, host: Any = None) -> str:
    where = f" (on {host})" if host else ""
    return f"no sign of life{where} for {age_s:.0f} s"
