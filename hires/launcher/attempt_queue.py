"""Runs frozen runs side by side on what they share, each attempt in a thread of its own.

    waiting ──fits──▶ running ──its ranks have ended──▶ ended: exit.json
                         ▲
       Ctrl-C, SIGTERM, SIGUSR2: passed on to every attempt once; nothing more starts

The ranks are processes, so a run that fails does not stop the others.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hires.core.errors import PREEMPTED, RunError
from hires.core.store import file_names, rundir
from hires.core.store.attempts import Attempt, next_attempt
from hires.core.store.ends import End, State
from hires.launcher.interface import FrozenRun, Share
from hires.launcher.launch_attempt import RANK, end_without_ranks, launch
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_progress import LinesTail
from hires.launcher.supervision.supervisor import Interrupts

POLL_S = 0.1
"""How often the attempts are looked at; it costs nothing that a measurement would show."""


@dataclass
class Running:
    """An attempt under way."""

    task: FrozenRun
    attempt: int
    gpus: Sequence[str] = ()
    """Those of this machine that it was given."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    """Its signals, and requests to cancel it alone."""
    signals: int = 0
    """How many of the queue's were passed on to it."""
    began_s: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    end: End | None = None
    """How it ended, once its thread has."""


@dataclass(frozen=True)
class Ended:
    """How a task ended."""

    task: FrozenRun
    attempt: int | None
    """None if no attempt could be made."""
    end: End
    wall_s: float = 0.0

    @property
    def state(self) -> str:
        """That of its end; ``saved``: it was asked to stop, and can go on."""
        return "saved" if self.end.exit_code == PREEMPTED else self.end.state


class Watcher(Protocol):
    """Is called when something happens to a task."""

    def started(self, task: FrozenRun, attempt: int) -> None:
        """An attempt was started."""

    def line(self, task: FrozenRun, line: dict[str, Any]) -> None:
        """A rank appended a line to ``metrics.jsonl``."""

    def ended(self, end: Ended) -> None:
        """An attempt ended, or could not be made."""

    def left(self, task: FrozenRun, why: str) -> None:
        """Another command makes the task, or has completed it."""


class LocalQueue:
    """Attempts that wait, run and have ended; two of the same run never run at once."""

    def __init__(
        self,
        tasks: Sequence[FrozenRun],
        rooms: Share,
        watcher: Watcher,
        module: str = RANK,
        cancelled: Callable[[], bool] = lambda: False,
        gpus: Sequence[str] = (),
    ) -> None:
        """Takes the attempts in the order of their start, and what they may use at once.

        If ``cancelled``, which is called again and again, returns True all ends, as after Ctrl-C.
        ``gpus`` of this machine, by the names of CUDA_VISIBLE_DEVICES, belong to one run at a time.
        """
        self.waiting = list(tasks)
        self.running: list[Running] = []
        self.ends: list[Ended] = []
        self.stopped: str | None = None
        """Why nothing more starts, in words."""
        self.interrupts = Interrupts()
        self._rooms = rooms
        self._watcher, self._cancelled = watcher, cancelled
        self._gpus = gpus
        self._module = module
        self._done = {task.path: task.done for task in tasks}  # complete attempts, as known here
        self._tails: dict[Path, LinesTail] = {}

    def work(self) -> None:
        """Runs all unless something stops it; no process is left then."""
        with self.interrupts:
            try:
                while self.running or (self.waiting and self.stopped is None):
                    # Ends first: they make room.
                    for run in list(self.running):
                        ended = run.end  # before its last lines are read
                        self._look(run)
                        if ended is not None:
                            assert run.thread is not None
                            run.thread.join()  # as long as that lives, its attempt seems to
                            self.running.remove(run)
                            wall_s = time.monotonic() - run.began_s
                            self._end(Ended(run.task, run.attempt, ended, wall_s))
                    self.stopped = self._stop_reason()
                    for run in self.running:  # a second Ctrl-C makes it hurry
                        for number in self.interrupts.received[run.signals :]:
                            run.interrupts.take(number)
                            run.signals += 1
                    # In order, but a run that has no room does not keep a smaller one waiting.
                    for task in list(self.waiting):
                        if self.stopped is None and self._fits(task):
                            self.waiting.remove(task)
                            self._begin(task)
                    if self.running:
                        time.sleep(POLL_S)
            finally:  # whatever went wrong here
                for run in self.running:
                    run.interrupts.take(signal.SIGTERM)
                for run in self.running:
                    assert run.thread is not None
                    run.thread.join()

    def _supervise(self, run: Running) -> None:
        """Runs the ranks of an attempt to their end."""
        path, number, gpus = run.task.path, run.attempt, run.gpus
        try:
            end = launch(path, number, module=self._module, interrupts=run.interrupts, gpus=gpus)
        except BaseException as error:
            end = End(State.FAILED, str(error) or type(error).__name__, "launch")
            # The queue continues even if the end cannot be written.
            with contextlib.suppress(Exception):
                if not Attempt(path, number).has_ended:
                    end_without_ranks(path, number, end)
        run.end = end

    def _stop_reason(self) -> str | None:
        """Returns why nothing more may start: a signal or ``hires cancel``."""
        if not self.interrupts.count and self._cancelled():
            self.interrupts.count_signal(signal.SIGTERM, "hires cancel")
        if self.interrupts.received:
            return f"stopped by {self.interrupts.name or 'SIGUSR2'}"
        return None

    def _begin(self, task: FrozenRun) -> None:
        """Starts a task, unless another command makes or has made it; a failed start is its end."""
        try:
            with running_elsewhere.exclusive_start(task.path):
                if len(rundir.done_attempts(task.path)) > self._done[task.path]:
                    self._done[task.path] += 1
                    self._watcher.left(task, "completed by another command meanwhile")
                    return
                run = rundir.RunDir(task.path, next_attempt(task.path, task.argv))
                gpus = self._free_gpus()[: task.gpus]  # it sees these only
                running = Running(task, run.attempt, gpus)
                running.thread = threading.Thread(
                    target=self._supervise, args=[running], daemon=True
                )
                running.thread.start()
                self.running.append(running)
        except running_elsewhere.UnderWayError as error:
            self._watcher.left(task, str(error))
        except RunError as error:
            self._end(Ended(task, None, End(State.FAILED, str(error), "launch")))
        else:
            self._tails[task.path] = LinesTail(run.attempt_dir, file_names.METRICS)
            self._watcher.started(task, run.attempt)

    def _fits(self, task: FrozenRun) -> bool:
        """Whether a run has room beside those that run now; one alone always has."""
        beside = [run.task for run in self.running]
        needs = zip(*(one.needs for one in [task, *beside]), strict=True)
        return not beside or (
            all(one.path != task.path for one in beside)  # no run twice at once
            and all(sum(some) <= room for some, room in zip(needs, self._rooms, strict=True))
            and task.gpus <= len(self._free_gpus())
        )

    def _free_gpus(self) -> list[str]:
        taken = {name for run in self.running for name in run.gpus}
        return [name for name in self._gpus if name not in taken]

    def _look(self, run: Running) -> None:
        """Passes on what the ranks recorded."""
        for line in self._tails[run.task.path].read():
            self._watcher.line(run.task, line)

    def _end(self, end: Ended) -> None:
        self._done[end.task.path] += end.state == State.DONE
        self.ends.append(end)
        self._watcher.ended(end)
