"""Runs many frozen runs on this machine, as many at once as options, cores and memory allow."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hires.core.errors import RunError
from hires.core.store import file_names, rundir
from hires.core.store.attempts import next_attempt
from hires.launcher.attempt_queue import AttemptQueue, Running
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_progress import MetricsTail

_LAUNCHER = "hires.launcher.local"


class Share(NamedTuple):
    """A part of this machine: what an attempt needs, or what all that run at once may use."""

    attempts: int = 1
    cores: int = 1
    memory_bytes: float = 0


@dataclass(frozen=True)
class PlannedAttempt:
    """One attempt that is to be made of a frozen run."""

    path: Path
    """The run folder."""
    argv: tuple[str, ...]
    """The command line that makes this run alone, for its record."""
    ranks: int
    needs: Share
    """Of the memory what is predicted for all ranks with their libraries."""
    done: int = 0
    """Complete attempts that the run had when this one was planned."""


@dataclass(frozen=True)
class Ended:
    """How a task ended."""

    task: PlannedAttempt
    attempt: int | None
    """None if no attempt could be made."""
    state: str
    """``done``, ``failed``, ``cancelled`` or ``lost``."""
    cause: str | None = None
    wall_s: float = 0.0


class Watcher(Protocol):
    """Is called when something happens to a task."""

    def started(self, task: PlannedAttempt, attempt: int) -> None:
        """An attempt was started."""

    def line(self, task: PlannedAttempt, line: dict[str, Any]) -> None:
        """A rank appended a line to ``metrics.jsonl``."""

    def ended(self, end: Ended) -> None:
        """An attempt ended, or could not be made."""

    def left(self, task: PlannedAttempt, why: str) -> None:
        """Another command makes the task, or has completed it."""


class LocalQueue(AttemptQueue[PlannedAttempt]):
    """Attempts that wait, run and have ended; two of the same run never run at once."""

    def __init__(
        self,
        tasks: Sequence[PlannedAttempt],
        rooms: Share,
        watcher: Watcher,
        module: str | None = None,
        rank_hours: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes the attempts in the order of their start, and what they may use.

        Args:
            tasks: one attempt each.
            rooms: how much of the machine they may use at once.
            watcher: is called at every start and end, and with every line of metrics.
            module: the Python module that every rank runs, if it is not hires' own.
            rank_hours: no attempt starts once ranks times hours, over all attempts, come to this.
            cancelled: called again and again; if it returns True all ends, as after Ctrl-C.
        """
        super().__init__(tasks, rooms)
        self.ends: list[Ended] = []
        self._rank_hours, self._watcher, self._cancelled = rank_hours, watcher, cancelled
        self._module = [module] if module else []
        self._done = {task.path: task.done for task in tasks}  # complete attempts, as known here
        self._tails: dict[Path, MetricsTail] = {}

    def stop_reason(self) -> str | None:
        """Returns why nothing more may start: a signal, ``hires cancel``, or the budget."""
        if not self.interrupts.count and self._cancelled():
            self.interrupts.count_signal(signal.SIGTERM, "hires cancel")
        attempts: list[Ended | Running[PlannedAttempt]] = [*self.ends, *self.running]
        used_h = sum(one.task.ranks * one.wall_s for one in attempts) / 3600
        why, hours = super().stop_reason(), self._rank_hours
        if why is None and hours and used_h >= hours:
            return f"the budget of {hours:g} rank hours is used up"
        return why

    def begin(self, task: PlannedAttempt) -> None:
        """Starts a task, unless another command makes or has made it; a failed start is its end."""
        try:
            with running_elsewhere.alone(task.path):
                if len(rundir.done_attempts(task.path)) > self._done[task.path]:
                    self._done[task.path] += 1
                    self._watcher.left(task, "completed by another command meanwhile")
                    return
                run = rundir.RunDir(task.path, next_attempt(task.path, task.argv))
                words = [_LAUNCHER, str(run.path), str(run.attempt), *self._module]
                log = run.attempt_dir / file_names.LOGS / file_names.LAUNCHER_LOG
                self.launch(task, run.attempt, words, log)
        except running_elsewhere.UnderWayError as error:
            self._watcher.left(task, str(error))
        except RunError as error:
            self._end(Ended(task, None, "failed", str(error)))
        else:
            self._tails[task.path] = MetricsTail(run.attempt_dir / file_names.METRICS)
            self._watcher.started(task, run.attempt)

    def look(self, run: Running[PlannedAttempt]) -> None:
        """Passes on what the ranks recorded."""
        for line in self._tails[run.task.path].read():
            self._watcher.line(run.task, line)

    def ended(self, run: Running[PlannedAttempt], code: int, state: str, cause: str | None) -> None:
        """Takes in how an attempt ended."""
        self._end(Ended(run.task, run.attempt, state, cause, run.wall_s))

    def _end(self, end: Ended) -> None:
        self._done[end.task.path] += end.state == "done"
        self.ends.append(end)
        self._watcher.ended(end)
