"""Runs many frozen runs on this machine, as many at once as fit.

Each attempt has a process of its own (:mod:`hires.launcher.local.local_launcher`), so that a run
which fails, or whose launcher is killed, does not stop the others.
As many run at once as the options, cores and memory allow; one alone always may. Ctrl-C goes on to
all of them, and what was not started stays pending.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hires.core.errors import RunError
from hires.core.store import file_names, provenance, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write
from hires.core.store.run_index import write_exit
from hires.launcher.ranks import spawn
from hires.launcher.ranks.rank_group import last_lines
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_progress import MetricsTail
from hires.launcher.supervision.interrupts import Interrupts

POLL_S = 0.1
"""How often the processes are looked at; it costs nothing that a measurement would see."""
_END_S = 10.0
"""How long a launcher may take to stop its ranks when this process ends with an error."""
_HOUR_S = 3600.0


@dataclass(frozen=True)
class PlannedAttempt:
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
    """Complete attempts that the run had when this one was planned."""

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

    task: PlannedAttempt
    attempt: int | None
    """None if no attempt could be made."""
    state: str
    """``done``, ``failed``, ``cancelled`` or ``lost``."""
    cause: str | None = None
    wall_s: float = 0.0


@dataclass
class Result:
    """What became of all tasks."""

    ended: list[Ended] = field(default_factory=list)
    pending: list[PlannedAttempt] = field(default_factory=list)
    """Those that were not started."""
    why: str | None = None
    """Why there are such."""
    interrupted: bool = False
    left: list[tuple[PlannedAttempt, str]] = field(default_factory=list)
    """Those that another command has completed or is making, and that in words."""


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


def run_all(
    tasks: Sequence[PlannedAttempt],
    limits: Limits,
    watcher: Watcher,
    module: str | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Result:
    """Runs the tasks in order and returns what became of them; no process is left then.

    Call it from a thread that lives until it returns: what it starts ends with that thread.

    Args:
        tasks: one attempt each; two of the same run never run at once.
        limits: how much of the machine they may use.
        watcher: is called at every start and end, and with every line of metrics.
        module: the Python module that every rank runs, if it is not hires' own.
        cancelled: called again and again; if it returns True all ends, as after Ctrl-C.
    """
    queue, why = _Queue(tasks, limits, watcher, module), None
    with Interrupts() as interrupts:
        try:
            while queue.running or (queue.waiting and why is None):
                queue.collect()
                if not interrupts.count and cancelled():
                    interrupts.count_signal(signal.SIGTERM, "hires cancel")
                if interrupts.count:
                    why = f"stopped by {interrupts.name}"
                    queue.pass_on(interrupts)
                elif limits.rank_hours and queue.rank_hours() >= limits.rank_hours:
                    why = f"the budget of {limits.rank_hours:g} rank hours is used up"
                else:
                    queue.start_some()
                if queue.running:
                    time.sleep(POLL_S)
        finally:
            queue.end_all()
        result = queue.result
        result.pending, result.why = queue.waiting, why if queue.waiting else None
        result.interrupted = interrupts.count > 0
        return result


@dataclass
class _Running:
    """An attempt under way."""

    task: PlannedAttempt
    attempt: int
    process: spawn.Child
    tail: MetricsTail
    started: str = field(default_factory=provenance.now)
    began_s: float = field(default_factory=time.monotonic)
    signals: int = 0
    """How many interrupts were passed on to it."""

    @property
    def wall_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began_s

    def send(self, number: int) -> None:
        """Sends a signal to its launcher, unless that has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class _Queue:
    """Tasks that wait, run and have ended."""

    def __init__(
        self, tasks: Sequence[PlannedAttempt], limits: Limits, watcher: Watcher, module: str | None
    ) -> None:
        self.waiting = list(tasks)
        self.running: list[_Running] = []
        self.result = Result()
        self._done = {task.path: task.done for task in tasks}  # complete attempts, as known here
        self._limits = limits
        self._watcher = watcher
        self._module = [module] if module else []

    def rank_hours(self) -> float:
        """Returns ranks times hours of all attempts so far."""
        attempts: list[Ended | _Running] = [*self.result.ended, *self.running]
        return sum(one.task.ranks * one.wall_s for one in attempts) / _HOUR_S

    def start_some(self) -> None:
        """Starts what fits beside the attempts that run, the first in order first."""
        limits = self._limits
        for task in list(self.waiting):
            if len(self.running) >= limits.at_once:
                return
            tasks = [task, *(run.task for run in self.running)]
            room, needed = limits.memory_bytes, sum(one.needs_bytes for one in tasks)
            if not self.running or (
                all(run.task.path != task.path for run in self.running)
                and sum(one.cores for one in tasks) <= limits.cores
                and (room is None or needed <= room)
            ):
                self.waiting.remove(task)
                self._start(task)

    def _start(self, task: PlannedAttempt) -> None:
        """Starts a task, unless another command makes or has made it; a failed start is its end."""
        try:
            with running_elsewhere.alone(task.path):
                if len(rundir.done_attempts(task.path)) > self._done[task.path]:
                    self._done[task.path] += 1
                    self._leave(task, "completed by another command meanwhile")
                    return
                run = rundir.start_attempt(task.path, task.argv)
                process = self._launched(run)
        except running_elsewhere.UnderWayError as error:
            self._leave(task, str(error))
        except RunError as error:
            self._end(Ended(task, None, "failed", str(error)))
        else:
            tail = MetricsTail(run.attempt_dir / file_names.METRICS)
            self.running.append(_Running(task, run.attempt, process, tail))
            self._watcher.started(task, run.attempt)

    def _launched(self, run: rundir.RunDir) -> spawn.Child:
        """Starts the launcher of an attempt, which Ctrl-C in the terminal does not reach."""
        command = [sys.executable, "-m", "hires.launcher.local.local_launcher"]
        command += [str(run.path), str(run.attempt), *self._module]
        path = run.attempt_dir / file_names.LOGS / file_names.LAUNCHER_LOG
        try:
            with path.open("ab") as output:
                return spawn.start(
                    command,
                    spawn.helper_environment(),
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                    death_signal=signal.SIGTERM,
                    heir=True,
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise cannot_write(path, error) from error

    def collect(self) -> None:
        """Passes on what the ranks recorded, and takes in the attempts that ended."""
        for run in list(self.running):
            code = run.process.poll()
            for line in run.tail.read():
                self._watcher.line(run.task, line)
            if code is not None:
                self.running.remove(run)
                self._end(_end_of(run, code))

    def _leave(self, task: PlannedAttempt, why: str) -> None:
        self.result.left.append((task, why))
        self._watcher.left(task, why)

    def _end(self, end: Ended) -> None:
        self._done[end.task.path] += end.state == "done"
        self.result.ended.append(end)
        self._watcher.ended(end)

    def pass_on(self, interrupts: Interrupts) -> None:
        """Sends every interrupt on to each launcher once; the second makes it hurry."""
        for run in self.running:
            while run.signals < interrupts.count:
                run.signals += 1
                run.send(interrupts.number)

    def end_all(self) -> None:
        """Leaves no process behind, whatever went wrong here."""
        for run in self.running:
            run.send(signal.SIGTERM)
        for run in self.running:
            try:
                run.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                run.send(signal.SIGKILL)
                run.process.wait()


def _end_of(run: _Running, code: int) -> Ended:
    """Returns how an attempt ended, as its launcher wrote it, or as it looks if that was killed."""
    attempt = Attempt(run.task.path, run.attempt)
    if end := attempt.exit:
        return Ended(run.task, run.attempt, end["state"], end.get("cause"), run.wall_s)
    if run.signals:
        state, cause = "cancelled", "stopped before its ranks were started"
    else:
        state, how = "failed", f"exited with code {code}"
        if code < 0:
            state, how = "lost", f"was killed by {signal.Signals(-code).name}"
        log = attempt.folder / file_names.LOGS / file_names.LAUNCHER_LOG
        lines = last_lines(log)[-1:]
        cause = f"its launcher {how}" + (f": {lines[0]}" if lines else "")
    with contextlib.suppress(RunError):  # on a full disk the end is still shown on screen
        write_exit(run.task.path, run.attempt, state, cause, {}, started=run.started)
    return Ended(run.task, run.attempt, state, cause, run.wall_s)
