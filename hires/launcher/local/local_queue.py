"""Runs many frozen runs on this machine, as many at once as fit.

Each attempt has a process of its own (:mod:`hires.launcher.local.point_process`), so that a run
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
from typing import Any

from hires.core.errors import RunError
from hires.core.store import file_names, provenance, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write
from hires.core.store.run_index import write_exit
from hires.launcher.local.queue_tasks import Ended, Limits, Result, Task, Watcher
from hires.launcher.ranks import spawn
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_progress import MetricsTail
from hires.launcher.supervision.interrupts import Interrupts

POLL_S = 0.1
"""How often the processes are looked at; it costs nothing that a measurement would see."""
_END_S = 10.0
"""How long a launcher may take to stop its ranks when this process ends with an error."""
_HOUR_S = 3600.0


@dataclass
class _Running:
    """An attempt under way."""

    task: Task
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


def run_all(
    tasks: Sequence[Task],
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
        cancelled: asked again and again; if it is true all ends, as after Ctrl-C.
    """
    with Interrupts() as interrupts:
        queue = Queue(tasks, limits, watcher, module)
        return queue.run(interrupts, cancelled)


class Queue:
    """Tasks that wait, run and have ended."""

    def __init__(
        self, tasks: Sequence[Task], limits: Limits, watcher: Watcher, module: str | None
    ) -> None:
        self.waiting = list(tasks)
        self.running: list[_Running] = []
        self.ended: list[Ended] = []
        self.left: list[tuple[Task, str]] = []
        self._known = {task.path: task.done for task in tasks}
        self._limits = limits
        self._watcher = watcher
        self._module = module

    def run(self, interrupts: Interrupts, cancelled: Callable[[], bool] = lambda: False) -> Result:
        """Returns what became of the tasks."""
        why = None
        try:
            while self.running or (self.waiting and why is None):
                self._collect()
                if not interrupts.count and cancelled():
                    interrupts.count_signal(signal.SIGTERM, "hires cancel")
                if interrupts.count:
                    why = f"stopped by {interrupts.name}"
                    self._pass_on(interrupts)
                elif self._spent_hours() >= (self._limits.rank_hours or float("inf")):
                    why = f"the budget of {self._limits.rank_hours:g} rank hours is used up"
                else:
                    self._start_some()
                if self.running:
                    time.sleep(POLL_S)
        finally:
            self._end_all()
        left = why if self.waiting else None
        return Result(self.ended, self.waiting, left, interrupts.count > 0, self.left)

    def _spent_hours(self) -> float:
        """Returns ranks times hours of all attempts so far."""
        spent_s = sum(end.task.ranks * end.wall_s for end in self.ended)
        return (spent_s + sum(run.task.ranks * run.wall_s for run in self.running)) / _HOUR_S

    def _start_some(self) -> None:
        """Starts what fits, the first in order first."""
        for task in list(self.waiting):
            if len(self.running) >= self._limits.at_once:
                return
            if self._fits(task):
                self.waiting.remove(task)
                self._start(task)

    def _fits(self, task: Task) -> bool:
        """Whether a task may run beside those that run now."""
        if not self.running:
            return True
        tasks = [task, *(run.task for run in self.running)]
        room, needed = self._limits.memory_bytes, sum(one.needs_bytes for one in tasks)
        return (
            all(run.task.path != task.path for run in self.running)
            and sum(one.cores for one in tasks) <= self._limits.cores
            and (room is None or needed <= room)
        )

    def _start(self, task: Task) -> None:
        """Starts a task; one that others have is left to them, one that cannot start has failed."""
        try:
            with running_elsewhere.alone(task.path, None, None):
                if len(rundir.done_attempts(task.path)) > self._known[task.path]:
                    self._known[task.path] += 1
                    self._leave(task, "completed by another command meanwhile")
                    return
                run = rundir.start_attempt(task.path, task.argv)
                process = self._process(run)
        except running_elsewhere.UnderWayError as error:
            self._leave(task, str(error))
            return
        except RunError as error:
            self._note(Ended(task, None, "failed", str(error)))
            return
        tail = MetricsTail(run.attempt_dir / file_names.METRICS)
        self.running.append(_Running(task, run.attempt, process, tail))
        self._watcher.started(task, run.attempt)

    def _process(self, run: rundir.RunDir) -> spawn.Child:
        """Starts the process of an attempt, which Ctrl-C in the terminal does not reach."""
        command = [
            sys.executable,
            "-m",
            "hires.launcher.local.point_process",
            str(run.path),
            str(run.attempt),
        ]
        path = run.attempt_dir / file_names.LOGS / file_names.LAUNCHER_LOG
        try:
            with path.open("ab") as output:
                streams = spawn.Streams(None, output.fileno(), output.fileno())
                module = [self._module] if self._module else []
                return spawn.start(
                    [*command, *module],
                    spawn.helper_environment(),
                    streams,
                    death_signal=signal.SIGTERM,
                    heir=True,
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise cannot_write(path, error) from error

    def _collect(self) -> None:
        """Passes on what the ranks recorded, and takes in the attempts that ended."""
        for run in list(self.running):
            code = run.process.poll()
            for line in run.tail.read():
                self._watcher.line(run.task, line)
            if code is not None:
                self.running.remove(run)
                self._note(_end_of(run, code))

    def _leave(self, task: Task, why: str) -> None:
        """Leaves a task to another command, and reports it."""
        self.left.append((task, why))
        self._watcher.left(task, why)

    def _note(self, end: Ended) -> None:
        """Keeps how a task ended, and reports it."""
        self._known[end.task.path] += end.state == "done"
        self.ended.append(end)
        self._watcher.ended(end)

    def _pass_on(self, interrupts: Interrupts) -> None:
        """Sends every interrupt on to each launcher once; the second makes it hurry."""
        for run in self.running:
            while run.signals < interrupts.count:
                run.signals += 1
                _send(run.process, interrupts.number)

    def _end_all(self) -> None:
        """Leaves no process behind, whatever went wrong here."""
        for run in self.running:
            _send(run.process, signal.SIGTERM)
        for run in self.running:
            try:
                run.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()


def _end_of(run: _Running, code: int) -> Ended:
    """Returns how an attempt ended, as its launcher wrote it, or as it looks if that was killed."""
    folder = file_names.attempt_dir(run.task.path, run.attempt)
    end = Attempt(run.task.path, run.attempt).exit
    if end:
        return Ended(run.task, run.attempt, end["state"], end.get("cause"), run.wall_s)
    if run.signals:
        state, cause = "cancelled", "stopped before its ranks were started"
    else:
        state, cause = "lost" if code < 0 else "failed", _died(folder, code)
    values: dict[str, Any] = {"state": state, "cause": cause, "exit_codes": {}, "reason": None}
    values |= {"started": run.started, "ended": provenance.now()}
    with contextlib.suppress(RunError):  # on a full disk the end is still shown on screen
        write_exit(run.task.path, run.attempt, values, {})
    return Ended(run.task, run.attempt, state, cause, run.wall_s)


def _died(folder: Path, code: int) -> str:
    """Returns how a launcher ended that left no word."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    text = ""
    with contextlib.suppress(OSError):
        text = (
            (folder / file_names.LOGS / file_names.LAUNCHER_LOG).read_text(errors="replace").strip()
        )
    return f"its launcher {how}" + (f": {text.splitlines()[-1]}" if text else "")


def _send(process: spawn.Child, number: int) -> None:
    """Sends a signal to a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
