"""Defines the state of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DONE, FAILED, CANCELLED, LOST = "done", "failed", "cancelled", "lost"
INFEASIBLE, PENDING, RUNNING = "infeasible", "pending", "running"
STATES = (DONE, FAILED, CANCELLED, LOST, INFEASIBLE, PENDING, RUNNING)


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
    """Kind of failure: a key of :data:`hires.launcher.end_reasons.END_REASONS`."""
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
