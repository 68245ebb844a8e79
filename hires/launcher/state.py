"""How is a run doing? The answer comes from its files, its process if it is here, and Slurm.

In this order: ``exit.json`` of the latest attempt; what the scheduler says if it has the attempt
(``job.json``); the process that started the ranks, if it is one of this machine; the heartbeats.
That a process, a job or a heartbeat is missing is no verdict yet: what looks lost is looked at a
second time, and a heartbeat must be old by the file system's own clock.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hires.core import checkpoints, pulse
from hires.core.errors import RunError
from hires.core.naming import SCHEMA
from hires.core.records import attempt_dir, other_schema
from hires.core.rundir import attempt_numbers
from hires.launcher import scheduler, whois
from hires.launcher.attempt_files import (
    Attempt,
    Clock,
    is_asked,
    latest,
    read_exit,
    read_job,
    read_json,
)
from hires.launcher.last_word import leave_cancelled
from hires.launcher.progress_ends import read_ends
from hires.launcher.repeats import Repeats
from hires.launcher.scheduler import Answer, Job

DONE, FAILED, CANCELLED, LOST = "done", "failed", "cancelled", "lost"
INFEASIBLE, PENDING, RUNNING = "infeasible", "pending", "running"
STATES = (DONE, FAILED, CANCELLED, LOST, INFEASIBLE, PENDING, RUNNING)

OLD_S = 60.0
"""A heartbeat of this age has stopped: twelve beats."""
AGAIN_S = 1.0
"""What looks lost is looked at again after so long: its last words may be on their way."""
Ask = Callable[[Iterable[Job]], dict[str, Answer]]
"""Asks a scheduler about jobs; the answers are by name."""

_ENDS: dict[str, tuple[str, str | None]] = {
    "CANCELLED": (CANCELLED, None),
    "TIMEOUT": (FAILED, "timeout"),
    "DEADLINE": (FAILED, "timeout"),
    "NODE_FAIL": (FAILED, "node"),
    "BOOT_FAIL": (FAILED, "node"),
    "OUT_OF_MEMORY": (FAILED, "oom"),
    "PREEMPTED": (FAILED, "preempted"),
    "FAILED": (FAILED, None),
}
"""What Slurm's words for an end mean, if the attempt itself left none."""
_QUEUED_AGAIN = ("preempted", "timeout", "node")
"""Reasons after which a scheduler may start the same job again, as the run's next attempt."""
_NUMBER = re.compile(r"^(?:(steps|batch)|  (requeues)): (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class RunState:
    """How one point is doing."""

    path: Path | None
    """The run folder; None: the point cannot run, so it has none."""
    name: str
    """Of the folder; of a point without one its overrides."""
    campaign: str
    state: str
    """One of ``STATES``."""
    reason: str | None = None
    """Kind of failure: ``oom``, ``hang``, ``nan``, ``launch``, ``preempted``, ``timeout``, ``node``
    or ``parity``."""
    cause: str | None = None
    """Why, in words; of a pending run why it waits."""
    attempt: int | None = None
    """None: none was begun."""
    step: int = 0
    """Steps that all ranks have finished; before the first of an attempt, those that are saved."""
    steps: int = 0
    """Of the run."""
    img_per_s: float | None = None
    """Of a run that is done the median of its record, else what it was lately."""
    peak_bytes: int | None = None
    """Of the rank that needs most."""
    expected: str | None = None
    """When a pending job is expected to start."""
    job: str | None = None
    """Number of its job."""
    heartbeat_s: float | None = None
    """Seconds since the last sign of life; of runs that are under way."""
    repeats: int = 1
    """How many complete attempts a sweep asked for."""
    missing: int = 0
    """How many of them a run that is done lacks."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {**asdict(self), "path": None if self.path is None else str(self.path)}


def states(paths: Sequence[Path], ask: Ask = scheduler.ask_slurm) -> list[RunState]:
    """Returns how runs are doing, in the order given.

    That a job was cancelled which left no word is written into its run: Slurm soon forgets it.

    Args:
        paths: run folders.
        ask: asks the scheduler; it is called only if some attempt is a job.
    """
    found = _look(paths, ask)
    # Their last words may be on their way; where there was no sign of life for long, none are.
    doubtful = [index for index, state in enumerate(found) if _is_doubtful(state)]
    if doubtful:
        time.sleep(AGAIN_S)
        again = _look([paths[index] for index in doubtful], ask)
        for index, state in zip(doubtful, again, strict=True):
            found[index] = state
            _keep(state)
    return found


def state_of(path: Path, ask: Ask = scheduler.ask_slurm) -> RunState:
    """Returns how one run is doing."""
    return states([path], ask)[0]


def _look(paths: Sequence[Path], ask: Ask) -> list[RunState]:
    """Returns the states as they look now."""
    attempts = [latest(path) for path in paths]
    jobs = [a.job for a in attempts if a is not None and a.job is not None and _may_live(a)]
    answers = ask(jobs) if jobs else {}
    clock, repeats = Clock(), Repeats()
    found = []
    for path, attempt in zip(paths, attempts, strict=True):
        state = _with_progress(_judged(path, attempt, answers, clock), attempt)
        if state.state == DONE:
            wanted, missing = repeats.wanted(path), repeats.missing(path)
            state = replace(state, repeats=wanted, missing=missing)
        found.append(_with_damage(state, attempt))
    return found


def goes_on(attempt: Attempt) -> bool:
    """Whether an attempt has not ended, or its job may start the run again."""
    return _may_live(attempt) and not _is_used_up(attempt)


def _may_live(attempt: Attempt) -> bool:
    """Whether a scheduler may still have plans with an attempt."""
    return attempt.exit is None or attempt.exit.get("reason") in _QUEUED_AGAIN


def _is_used_up(attempt: Attempt) -> bool:
    """Whether a run that shares its job reached the time limit so often that only others go on."""
    job, end = attempt.job or {}, attempt.exit or {}
    if job.get("pack", 1) == 1 or end.get("reason") != "timeout":
        return False
    ends = 0
    for number in attempt_numbers(attempt.path):
        folder = attempt_dir(attempt.path, number)
        same = (read_job(folder) or {}).get("job") == job.get("job")
        ends += same and (read_exit(folder) or {}).get("reason") == "timeout"
    return ends > _numbers(attempt.path).get("requeues", 0)


def _is_doubtful(state: RunState) -> bool:
    """Whether a run looks lost for the first time, or cancelled without having said so."""
    if _has_word(state):
        return False
    if state.state == LOST:
        return state.heartbeat_s is None or state.heartbeat_s <= OLD_S
    return state.state == CANCELLED


def _has_word(state: RunState) -> bool:
    """Whether a run has no attempt, or its latest one left ``exit.json``."""
    if state.path is None or state.attempt is None:
        return True
    return (attempt_dir(state.path, state.attempt) / "exit.json").exists()


def _keep(state: RunState) -> None:
    """Writes down that a run was cancelled which has not said so itself."""
    if state.state != CANCELLED or _has_word(state):
        return
    assert state.path is not None
    assert state.attempt is not None
    with contextlib.suppress(RunError):  # of somebody else's run it is only told
        leave_cancelled(state.path, state.attempt, str(state.cause))


def _judged(
    path: Path, attempt: Attempt | None, answers: dict[str, Answer], clock: Clock
) -> RunState:
    """Returns a run's state without its progress."""
    state = RunState(path, path.name, path.parent.name, PENDING)
    if attempt is None:
        return replace(state, cause="no attempt was begun")
    state = replace(state, attempt=attempt.number)
    name = None if attempt.job is None else scheduler.job_name(attempt.job)
    answer = answers.get(name or "", Answer(scheduler.UNKNOWN))
    if attempt.exit is not None:
        lives = answer.state in (scheduler.PENDING, scheduler.RUNNING)
        if lives and goes_on(attempt):
            why = f"queued again after {attempt.exit['reason']}"
            cause = f"{why} ({answer.reason})" if answer.reason else why
            return replace(state, cause=cause, expected=answer.expected, job=name)
        return _ended(state, attempt.exit)
    if attempt.job is not None:
        return _as_job(replace(state, job=name), attempt, answer, clock)
    if attempt.launched is None:
        age_s = _age(attempt, clock)
        if attempt.damaged:
            return replace(state, state=LOST, heartbeat_s=age_s)
        if age_s <= OLD_S:
            return replace(state, cause="its ranks were not started yet")
        cause = "whoever made the attempt ended before any rank was started"
        return replace(state, state=LOST, cause=cause, heartbeat_s=age_s)
    return _as_process(state, attempt, attempt.launched, clock)


def _ended(state: RunState, end: dict[str, Any]) -> RunState:
    """Returns the state that an ``exit.json`` tells, unless an earlier attempt was complete."""
    said, reason, cause = end.get("state"), end.get("reason"), end.get("cause")
    if said != DONE and state.path is not None:
        record = read_json(state.path / "record.json") or {}
        if record.get("state") == DONE and type(record.get("attempt")) is int:
            return replace(state, state=DONE, attempt=record["attempt"])
    known = said if said in STATES else FAILED
    return replace(state, state=known, reason=reason, cause=cause)


def _as_process(
    state: RunState, attempt: Attempt, launched: dict[str, Any], clock: Clock
) -> RunState:
    """Returns the state of an attempt that a process started, which left no word yet."""
    age_s = _age(attempt, clock)
    state = replace(state, state=RUNNING, heartbeat_s=age_s)
    lives = whois.lives(launched)
    if lives is False:
        who = f"its process {launched.get('pid')} on {launched.get('host')}"
        return replace(state, state=LOST, cause=f"{who} is gone, and left no exit.json")
    if lives is None and age_s > OLD_S:
        return replace(state, state=LOST, cause=_silent(age_s, launched.get("host")))
    return state


def _as_job(state: RunState, attempt: Attempt, answer: Answer, clock: Clock) -> RunState:
    """Returns the state of an attempt that is a job of a scheduler and left no word yet."""
    began = attempt.launched is not None
    age_s = _age(attempt, clock)
    beats = began and age_s <= OLD_S
    if began:
        state = replace(state, heartbeat_s=age_s)
    if answer.state == scheduler.PENDING:
        return replace(state, cause=answer.reason, expected=answer.expected)
    if answer.state == scheduler.RUNNING:
        if not began and (attempt.job or {}).get("pack", 1) > 1:
            return replace(state, cause=f"waits for its turn in job {state.job}, which runs")
        return replace(state, state=RUNNING, cause=None if beats or not began else _silent(age_s))
    ended = answer.state == scheduler.ENDED
    gone = answer.state == scheduler.GONE and not beats
    if (ended or gone) and is_asked(attempt.folder):
        cause = f"job {state.job} was cancelled, and left no word"
        return replace(state, state=CANCELLED, cause=cause)
    if ended and answer.reason in _ENDS:
        known, reason = _ENDS[answer.reason]
        cause = f"job {state.job} ended with {answer.reason}, and left no word"
        return replace(state, state=known, reason=reason, cause=cause)
    if beats:
        return replace(state, state=RUNNING)
    if answer.state == scheduler.UNKNOWN:
        why = answer.reason or "the scheduler does not answer"
        if began:
            return replace(state, state=LOST, cause=f"{_silent(age_s)}; {why}")
        return replace(state, cause=why)
    if not began and age_s <= OLD_S:
        return replace(state, cause="the scheduler does not list it yet")
    how = "has ended" if ended else "is not known to the scheduler"
    why = "left no exit.json" if began else "never began: it was cancelled there, or died at once"
    return replace(state, state=LOST, cause=f"job {state.job} {how}, and {why}")


def _age(attempt: Attempt, clock: Clock) -> float:
    """Returns the seconds since an attempt's last sign of life."""
    return max(0.0, clock.now(attempt.path) - attempt.last_sign())


def _silent(age_s: float, host: Any = None) -> str:
    """Says that a heart has stopped."""
    where = f" (on {host})" if host else ""
    return f"no sign of life{where} for {age_s:.0f} s"


def _with_progress(state: RunState, attempt: Attempt | None) -> RunState:
    """Adds how far a run is, how fast, and with how much memory."""
    assert state.path is not None
    numbers = _numbers(state.path)
    steps = numbers.get("steps", 0)
    if state.state == DONE:
        return _from_record(replace(state, step=steps, steps=steps))
    # An attempt that has not begun, or not finished a step, goes on where the run was saved.
    saved = checkpoints.saved_step(state.path)
    state = replace(state, step=saved, steps=steps)
    if attempt is None or (state.state == PENDING and attempt.launched is None):
        return state
    ends = read_ends(attempt.folder / "metrics.jsonl", len(pulse.heartbeats(attempt.folder)))
    speed = numbers.get("batch", 0) / ends.step_s if ends.step_s else None
    if ends.damaged:
        state = _damaged(state, f"{attempt.folder.name}/metrics.jsonl")
    return replace(state, step=ends.steps or saved, img_per_s=speed, peak_bytes=ends.peak_bytes)


def _from_record(state: RunState) -> RunState:
    """Adds the numbers of a run that is done."""
    assert state.path is not None
    file = state.path / "record.json"
    record = read_json(file)
    if record is None:
        return _damaged(state, file.name) if file.exists() else state
    if record.get("schema", SCHEMA) != SCHEMA:
        return replace(state, cause=f"its record is not read: {other_schema(record)}")
    try:
        rates = (record.get("throughput") or {}).get("img_per_s") or {}
        speed = None if rates.get("median") is None else float(rates["median"])
        peaks = [int(rank.get("peak_bytes") or 0) for rank in record.get("memory") or []]
    except (AttributeError, TypeError, ValueError, OverflowError):
        return _damaged(state, file.name)
    return replace(state, img_per_s=speed, peak_bytes=max(peaks, default=0) or None)


def _with_damage(state: RunState, attempt: Attempt | None) -> RunState:
    """Names the files of an attempt that make no sense; the other runs are shown as they are."""
    return _damaged(state, *attempt.damaged) if attempt and attempt.damaged else state


def _damaged(state: RunState, *files: str) -> RunState:
    """Adds to the cause which files are damaged."""
    parts = [f"damaged: {', '.join(files)}", *([state.cause] if state.cause else [])]
    return replace(state, cause="; ".join(parts))


def _numbers(path: Path) -> dict[str, int]:
    """Returns some numbers of a frozen config; to parse all of it would take milliseconds."""
    with contextlib.suppress(OSError):
        text = (path / "config.yaml").read_text(encoding="utf-8", errors="replace")
        return {key or other: int(value) for key, other, value in _NUMBER.findall(text)}
    return {}
