"""Defines the state of a run, and the numbers of its progress."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hires.core.ranks import heartbeat
from hires.core.store import checkpoints, file_names, reading
from hires.core.store.attempts import Attempt
from hires.core.store.naming import SCHEMA
from hires.core.store.records import other_schema
from hires.launcher.status.run_progress import read_ends

DONE, FAILED, CANCELLED, LOST = "done", "failed", "cancelled", "lost"
INFEASIBLE, PENDING, RUNNING = "infeasible", "pending", "running"
STATES = (DONE, FAILED, CANCELLED, LOST, INFEASIBLE, PENDING, RUNNING)

_NUMBER = re.compile(r"^(?:(steps|batch)|  (requeues)): (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class RunState:
    """The state of one point."""

    path: Path | None
    """The run folder; None: the point cannot run, so it has none."""
    name: str
    """Of the folder; of a point without one its overrides."""
    campaign: str
    state: str
    """One of ``STATES``."""
    reason: str | None = None
    """A word of :data:`hires.launcher.end_reasons.END_REASONS`."""
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


def with_progress(state: RunState, attempt: Attempt | None) -> RunState:
    """Adds how far a run is, how fast, and with how much memory."""
    assert state.path is not None
    numbers = config_numbers(state.path)
    steps = numbers.get("steps", 0)
    if state.state == DONE:
        return _from_record(replace(state, step=steps, steps=steps))
    # An attempt that has not begun, or not finished a step, goes on where the run was saved.
    saved = checkpoints.saved_step(state.path)
    state = replace(state, step=saved, steps=steps)
    if attempt is None or (state.state == PENDING and not attempt.launched):
        return state
    ends = read_ends(attempt.folder / file_names.METRICS, len(heartbeat.heartbeats(attempt.folder)))
    speed = numbers.get("batch", 0) / ends.step_s if ends.step_s else None
    if ends.damaged:
        state = _damaged(state, f"{attempt.folder.name}/{file_names.METRICS}")
    return replace(state, step=ends.steps or saved, img_per_s=speed, peak_bytes=ends.peak_bytes)


def _from_record(state: RunState) -> RunState:
    """Adds the numbers of a run that is done."""
    assert state.path is not None
    file = state.path / file_names.RECORD
    record = reading.read_json(file, [])
    if not record:
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


def with_damage(state: RunState, attempt: Attempt | None) -> RunState:
    """Names the files of an attempt that make no sense; the other runs are shown as they are."""
    return _damaged(state, *attempt.damaged) if attempt and attempt.damaged else state


def _damaged(state: RunState, *files: str) -> RunState:
    """Adds to the cause which files are damaged."""
    parts = [f"damaged: {', '.join(files)}", *([state.cause] if state.cause else [])]
    return replace(state, cause="; ".join(parts))


def config_numbers(path: Path) -> dict[str, int]:
    """Returns some numbers of a frozen config; to parse all of it would take milliseconds."""
    data = reading.read_bytes(path / file_names.CONFIG, []) or b""
    found = _NUMBER.findall(data.decode(errors="replace"))
    return {key or other: int(value) for key, other, value in found}
