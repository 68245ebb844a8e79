"""Tasks of the local queue, the share of the machine that they may use, and how they ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One attempt that is to be made of a frozen run."""

    path: Path
    """The run folder."""
    argv: tuple[str, ...]
    """The command line that makes this run alone, for its record."""
    ranks: int
    threads: int = 1
    """Compute threads of every rank."""
    needs_bytes: int = 0
    """Predicted memory of all ranks with their libraries; 0: unknown."""
    done: int = 0
    """Complete attempts of the run that were known when this one was planned."""

    @property
    def cores(self) -> int:
        """Cores that it keeps busy."""
        return self.ranks * self.threads


@dataclass(frozen=True)
class Limits:
    """How much of the machine may be used."""

    at_once: int = 1
    """Most attempts that run at the same time."""
    cores: int = 1
    """Cores that attempts which run at the same time may keep busy together."""
    memory_bytes: int | None = None
    """Memory that they may need together; None: unknown."""
    rank_hours: float | None = None
    """No attempt starts once ranks times hours, over all attempts, come to this; None: no limit."""


@dataclass(frozen=True)
class Ended:
    """How a task ended."""

    task: Task
    attempt: int | None
    """None if no attempt could be made."""
    state: str
    """``done``, ``failed``, ``cancelled`` or ``lost``."""
    cause: str | None = None
    wall_s: float = 0.0


@dataclass(frozen=True)
class Result:
    """What became of all tasks."""

    ended: list[Ended]
    pending: list[Task]
    """Those that were not started."""
    why: str | None = None
    """Why there are such."""
    interrupted: bool = False
    left: list[tuple[Task, str]] = field(default_factory=list)
    """Those that others have completed or are making, and that in words."""


class Watcher(Protocol):
    """Is called when something happens to a task."""

    def started(self, task: Task, attempt: int) -> None:
        """An attempt was started."""

    def line(self, task: Task, line: dict[str, Any]) -> None:
        """A rank of a running attempt appended a line to ``metrics.jsonl``."""

    def ended(self, end: Ended) -> None:
        """An attempt ended, or could not be made."""

    def left(self, task: Task, why: str) -> None:
        """A task is left to another command, or was completed by one."""
