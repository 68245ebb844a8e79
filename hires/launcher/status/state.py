"""Determines the state of runs from their files, their process if it is here, and their scheduler.

The first of these that says something counts:

    exit.json of the latest attempt          done, failed, cancelled; pending if its job restarts
    job.json: the scheduler's answer         pending, running, cancelled, failed, lost
    the process that started the ranks       running, lost, if it is one of this machine
    the heartbeats                           running; lost if older than OLD_S

A missing process, job or heartbeat alone never marks a run as lost: it is looked at a second time,
and heartbeats are compared with the file system's own clock.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hires.core.ranks.heartbeat import clock_ahead_s, heartbeats, last_sign
from hires.core.store import campaign, checkpoints, file_names, provenance, reading, rundir
from hires.core.store.attempts import Attempt, latest
from hires.core.store.ends import JOB_ENDS, State
from hires.core.store.file_names import StrPath
from hires.core.store.naming import SCHEMA
from hires.core.store.records import done_attempt, other_schema
from hires.core.store.rundir import NamedRuns, campaigns, matching, of_campaign
from hires.launcher import interface
from hires.launcher.interface import ENDED, GONE, UNKNOWN, JobStatus
from hires.launcher.status.run_progress import read_ends

OLD_S = 60.0
"""A heartbeat of this age has stopped: twelve beats."""
AGAIN_S = 1.0
"""What looks lost is looked at again after so long: its exit.json may be on its way."""
_NUMBER = re.compile(r"^(steps|batch): (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class RunState:
    """The state of one point."""

    path: Path | None
    """The run folder; None: the point cannot run, so it has none."""
    name: str
    """Of the folder; of a point without one its overrides."""
    campaign: str
    state: str
    """One of :class:`State`."""
    reason: str | None = None
    """Kind of failure: a key of :data:`hires.core.store.ends.END_REASONS`."""
    cause: str | None = None
    """Why, in words; of a pending run why it waits."""
    attempt: int | None = None
    """None: none was begun."""
    step: int = 0
    """Steps that all ranks have finished; before the first of an attempt, those that are saved."""
    steps: int = 0
    img_per_s: float | None = None
    """Of a run that is done the median of its record, else what it was lately."""
    left_s: float | None = None
    """Seconds that the other steps take at this speed; of runs that are under way."""
    peak_bytes: int | None = None
    """Of the rank that needs most."""
    expected: str | None = None
    """When a pending job is expected to start."""
    job: str | None = None
    heartbeat_s: float | None = None
    """Seconds since the last sign of life; of runs that are under way."""
    repeats: int = 1
    """How many complete attempts a sweep asked for."""
    missing: int = 0
    """How many of them a run that is done lacks."""


def states(paths: Sequence[Path]) -> list[RunState]:
    """Returns the states of runs, given by their folders, in the same order."""
    judged = _look(paths)
    doubtful = [index for index, state in enumerate(judged) if _is_doubtful(state)]
    if doubtful:
        time.sleep(AGAIN_S)
    again = _look([paths[index] for index in doubtful])
    for index, state in zip(doubtful, again, strict=True):
        judged[index] = state
    return judged


def is_alive(attempt: Attempt) -> bool:
    """Whether a process that started an attempt's ranks runs, as far as that is seen from here."""
    if not attempt.launched:
        return False
    lives = provenance.lives(attempt.launched)
    return age_s(attempt) <= OLD_S if lives is None else lives


def age_s(attempt: Attempt) -> float:
    """Returns the seconds since an attempt's last sign of life.

    Of ranks elsewhere it counts by the file system's clock, which a file in the campaign's folder
    shows for a moment; all other reading of states writes nothing.
    """
    is_here = provenance.is_here(attempt.launched)
    now_s = time.time() + (0.0 if is_here else clock_ahead_s(attempt.run.parent))
    return max(0.0, now_s - last_sign(attempt.folder))


def _look(paths: Sequence[Path]) -> list[RunState]:
    attempts = [latest(path) for path in paths]
    jobs = [a.job for a in attempts if a is not None and a.job and a.may_go_on]
    answers = interface.job_states(jobs)

    @functools.cache
    def repeats(folder: Path) -> dict[str, int]:
        return {point.run: point.repeat for point in campaign.read(folder, []).points}

    judged = []
    for path, attempt in zip(paths, attempts, strict=True):
        state = RunState(
            path, path.name, path.parent.name, State.PENDING, cause="no attempt was begun"
        )
        if attempt is not None:
            state = judge(attempt, answers.get(attempt.job_name or "", JobStatus(UNKNOWN)))
        state = _with_progress(state, path, attempt)
        # A repeat that failed leaves the run done, so the state alone does not show it.
        wanted = repeats(path.parent).get(path.name, 1) if state.state == State.DONE else 1
        if wanted > 1:
            missing = max(0, wanted - len(rundir.done_attempts(path)))
            state = replace(state, repeats=wanted, missing=missing)
        judged.append(_with_damage(state, attempt))
    return judged


def _with_damage(state: RunState, latest: Attempt | None) -> RunState:
    """Adds which files of the latest attempt, and of the one that is shown, cannot be used."""
    if latest is None:
        return state
    damaged = latest.damaged
    if state.attempt is not None and state.attempt != latest.number:
        damaged = (*Attempt(latest.run, state.attempt).damaged, *damaged)
    return _damaged(state, *damaged) if damaged else state


def _is_doubtful(state: RunState) -> bool:
    """Whether a run looks lost for the first time, or cancelled, without an ``exit.json``."""
    if (
        state.path is None
        or state.attempt is None
        or state.state not in (State.LOST, State.CANCELLED)
    ):
        return False
    attempt = Attempt(state.path, state.attempt)
    if attempt.has_ended:  # of a job that was queued again, and cancelled as it waited
        return state.state == State.CANCELLED and attempt.may_go_on
    return state.state == State.CANCELLED or state.heartbeat_s is None or state.heartbeat_s <= OLD_S


def judge(attempt: Attempt, answer: JobStatus) -> RunState:
    """Returns the state of a run, of its latest attempt and what the scheduler says of its job."""
    run, end, name = attempt.run, attempt.exit, attempt.job_name
    state = RunState(run, run.name, run.parent.name, State.PENDING, attempt=attempt.number)
    if end and answer.state in (State.PENDING, State.RUNNING) and end.restarts:
        why = f" ({answer.reason})" if answer.reason else ""
        again = f"queued again after {end.reason}{why}"
        return replace(state, cause=again, expected=answer.expected, job=name)
    if end and answer == JobStatus(ENDED, "CANCELLED") and end.restarts:
        waited = f"job {name} was cancelled while it waited to go on"
        return replace(state, state=State.CANCELLED, cause=waited)
    if end is None or end.state != State.DONE:  # an earlier attempt may have been complete
        done = done_attempt(run)
        if done is not None and (end or done == attempt.number):
            return replace(state, state=State.DONE, attempt=done)
    if end:
        return replace(state, state=end.state, reason=end.reason, cause=end.cause)
    if attempt.job:
        return _judge_job(replace(state, job=name), attempt, answer)
    age, launched = age_s(attempt), attempt.launched
    if not launched and age <= OLD_S and not attempt.damaged:
        return replace(state, cause="its ranks were not started yet")
    state = replace(state, heartbeat_s=age)
    if is_alive(attempt):
        return replace(state, state=State.RUNNING)
    cause: str | None = _silent(age, launched.get("host"))
    if not launched:
        cause = None if attempt.damaged else "the launcher exited before it started any rank"
    elif provenance.lives(launched) is False:
        who = f"its supervisor (process {launched.get('pid')} on {launched.get('host')})"
        cause = f"{who} is gone, and left no exit.json"
    return replace(state, state=State.LOST, cause=cause)


def _judge_job(state: RunState, attempt: Attempt, answer: JobStatus) -> RunState:
    """Returns the state of an attempt without ``exit.json`` that is a job."""
    began, job = bool(attempt.launched), f"job {state.job}"
    if answer.state == State.PENDING:
        return replace(state, cause=answer.reason, expected=answer.expected)
    age = age_s(attempt)
    beats = began and age <= OLD_S
    if began:
        state = replace(state, heartbeat_s=age)
    if answer.state == State.RUNNING:
        silent = None if beats or not began else _silent(age)
        return replace(state, state=State.RUNNING, cause=answer.reason or silent)
    ended = answer.state == ENDED
    if (ended or (answer.state == GONE and not beats)) and attempt.is_cancelled:
        return replace(
            state, state=State.CANCELLED, cause=f"{job} was cancelled, and left no exit.json"
        )
    if ended and answer.reason in JOB_ENDS:
        name, reason = JOB_ENDS[answer.reason]
        cause = f"{job} ended with {answer.reason}, and left no exit.json"
        if answer.reason == "FAILED" and not began:
            reason = "launch"
            cause += (
                f": {file_names.JOB_LOG} says why, or its node does not see {attempt.run}; keep "
                f"results= on a file system that all nodes mount at the same place"
            )
        return replace(state, state=name, reason=reason, cause=cause)
    if beats:
        return replace(state, state=State.RUNNING)
    if answer.state == UNKNOWN:
        why = answer.reason or "the scheduler does not answer"
        if began:
            return replace(state, state=State.LOST, cause=f"{_silent(age)}; {why}")
        return replace(state, cause=why)
    if not began and age <= OLD_S:
        return replace(state, cause="the scheduler does not list it yet")
    how = "has ended" if ended else "is not known to the scheduler"
    why = "left no exit.json: its supervisor was killed"
    if not began:
        why = f"never began: it was cancelled there, or its node does not see {attempt.run}"
    return replace(state, state=State.LOST, cause=f"{job} {how}, and {why}")


def _silent(age: float, host: Any = None) -> str:
    return f"no sign of life{f' (on {host})' if host else ''} for {age:.0f} s"


def _with_progress(state: RunState, path: Path, attempt: Attempt | None) -> RunState:
    """Adds how far a run is, how fast, and with how much memory."""
    numbers = _config_numbers(path)
    if len(numbers) < 2:
        state = _damaged(state, file_names.CONFIG)
    steps = numbers.get("steps", 0)
    if state.state == State.DONE:
        return _with_record(replace(state, step=steps, steps=steps), path / file_names.RECORD)
    # An attempt that has not begun, or not finished a step, goes on where the run was saved.
    saved = checkpoints.saved_step(path)
    state = replace(state, step=saved, steps=steps)
    if attempt is None or (state.state == State.PENDING and not attempt.launched):
        return state
    ends = read_ends(attempt.folder, len(heartbeats(attempt.folder)))
    speed = numbers.get("batch", 0) / ends.step_s if ends.step_s else None
    if ends.damaged:
        state = _damaged(state, f"{attempt.folder.name}/{file_names.METRICS}")
    state = replace(state, step=ends.steps or saved, img_per_s=speed, peak_bytes=ends.peak_bytes)
    if state.state == State.RUNNING and ends.step_s and not state.cause:
        return replace(state, left_s=ends.step_s * max(0, steps - state.step))
    return state


def _with_record(state: RunState, file: Path) -> RunState:
    record = reading.read_json(file, [])
    if not record:
        return _damaged(state, file.name)
    if record.get("schema", SCHEMA) != SCHEMA:
        return replace(state, cause=f"its record is not read: {other_schema(record)}")
    try:
        rates = (record.get("throughput") or {}).get("img_per_s") or {}
        speed = None if rates.get("median") is None else float(rates["median"])
        peaks = [int(rank.get("peak_bytes") or 0) for rank in record.get("memory") or []]
    except (AttributeError, TypeError, ValueError, OverflowError):
        return _damaged(state, file.name)
    return replace(state, img_per_s=speed, peak_bytes=max(peaks, default=0) or None)


def _damaged(state: RunState, *files: str) -> RunState:
    parts = [f"damaged: {', '.join(files)}", *([state.cause] if state.cause else [])]
    return replace(state, cause="; ".join(parts))


def _config_numbers(path: Path) -> dict[str, int]:
    """Returns some numbers of a frozen config; to parse all of it would take milliseconds."""
    data = reading.read_bytes(path / file_names.CONFIG, []) or b""
    matches = _NUMBER.findall(data.decode(errors="replace"))
    return {key: int(value) for key, value in matches}


@dataclass
class Selection:
    """Some runs."""

    paths: list[Path] = field(default_factory=list)
    """Their folders, absolute, each once."""
    planned: list[RunState] = field(default_factory=list)
    """Points of their campaigns without a folder: they cannot run, or were not begun."""
    campaigns: list[Path] = field(default_factory=list)
    """Folders of the campaigns that were meant as a whole, absolute."""

    @property
    def whole_campaigns(self) -> list[Path]:
        """The campaigns all runs of which were chosen, and so what they planned."""
        folders = dict.fromkeys([*self.campaigns, *(path.parent for path in self.paths)])
        chosen = set(self.paths)
        return [f for f in folders if chosen.issuperset(of_campaign(f))]


def select(names: Sequence[str], results: StrPath = "results") -> Selection:
    """Returns the runs that some names mean; all campaigns if there are none.

    A name of neither runs nor a campaign, and one that may mean several, is a ConfigError.
    """
    every = campaigns(results)
    runs = NamedRuns([run for folder in every for run in of_campaign(folder)], every)
    if names:
        runs = matching(names, results)
    planned = dict.fromkeys(point for folder in runs.campaigns for point in _planned(folder))
    return Selection(runs.paths, [*planned], runs.campaigns)


def _planned(folder: Path) -> list[RunState]:
    """Returns the points of a campaign that have no run folder."""
    runs = {run.name for run in of_campaign(folder)}
    plans = campaign.read(folder, reading.Warned())
    planned = [
        RunState(None, point.run, folder.name, State.PENDING, cause="planned, and not begun")
        for point in plans.points
        if point.run not in runs
    ]
    for out in plans.excluded:
        name = " ".join(out.overrides) or "?"
        planned.append(RunState(None, name, folder.name, out.state, cause=out.reason))
    return planned
