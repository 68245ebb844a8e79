"""Runs frozen runs side by side on what they share, each attempt under a launcher of its own.

    waiting ──fits──▶ running ──its launcher exits──▶ ended: exit.json, written here if need be
                         ▲
       Ctrl-C, SIGTERM, SIGUSR2: sent on to every launcher once; nothing more starts

The launchers are processes, so a run that fails, or whose launcher is killed, does not stop the
others.
"""

from __future__ import annotations

import collections
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from hires.core.errors import PREEMPTED, RunError
from hires.core.python_command import module_command
from hires.core.ranks.gpus import VISIBLE
from hires.core.store import file_names, provenance, rundir
from hires.core.store.attempts import Attempt, next_attempt
from hires.core.store.ends import End, State
from hires.launcher.interface import FrozenRun, Share
from hires.launcher.local.local_gpus import LocalGpus
from hires.launcher.local.local_launcher import end_without_ranks
from hires.launcher.ranks import spawn
from hires.launcher.ranks.rank_group import last_lines
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_progress import LinesTail
from hires.launcher.supervision.interrupts import Interrupts

log = logging.getLogger(__name__)
POLL_S = 0.1
"""How often the processes are polled; it costs nothing that a measurement would show."""
_END_S = 10.0
"""How long a launcher may take to stop its ranks when this process ends with an error."""


@dataclass
class Running:
    """An attempt under way."""

    task: FrozenRun
    attempt: int
    process: spawn.Child
    log: Path
    """What its launcher prints."""
    started: str = field(default_factory=provenance.now)
    began_s: float = field(default_factory=time.monotonic)
    signals: int = 0
    """How many signals were passed on to it."""
    gpus: Sequence[str] = ()
    """Those of this machine that it was given."""

    @property
    def wall_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began_s


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
        module: str | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        gpus: LocalGpus | None = None,
    ) -> None:
        """Takes the attempts in the order of their start, and what they may use at once.

        If ``cancelled``, which is called again and again, returns True all ends, as after Ctrl-C.
        """
        self.waiting = list(tasks)
        self.running: list[Running] = []
        self.ends: list[Ended] = []
        self.stopped: str | None = None
        """Why nothing more starts, in words."""
        self.interrupts = Interrupts()
        self._rooms = rooms
        self._watcher, self._cancelled = watcher, cancelled
        self._gpus = gpus or LocalGpus([])
        self._module = [module] if module else []
        self._done = {task.path: task.done for task in tasks}  # complete attempts, as known here
        self._tails: dict[Path, LinesTail] = {}

    def work(self) -> None:
        """Runs all unless something stops it; no process is left then.

        Call it from a thread that lives until it returns: what it starts ends with that thread.
        """
        with self.interrupts:
            try:
                while self.running or (self.waiting and self.stopped is None):
                    # Ends first: they make room.
                    for run in list(self.running):
                        code = run.process.poll()
                        self._look(run)
                        if code is not None:
                            self.running.remove(run)
                            self._end(Ended(run.task, run.attempt, _end_of(run, code), run.wall_s))
                    self.stopped = self._stop_reason()
                    for run in self.running:  # a second Ctrl-C makes it hurry
                        for number in self.interrupts.received[run.signals :]:
                            run.process.send_signal(number)
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
                    run.process.send_signal(signal.SIGTERM)
                for run in self.running:
                    try:
                        run.process.wait(_END_S)
                    except subprocess.TimeoutExpired:
                        run.process.kill()
                        run.process.wait()

    def _launch(
        self,
        task: FrozenRun,
        attempt: int,
        words: Sequence[str],
        log: Path,
        gpus: Sequence[str] | None = None,
    ) -> None:
        """Starts ``python -m words``, an attempt's launcher; if it cannot, that is its end.

        It sees these ``gpus`` only, or as this process all there are.
        """
        command, environ = module_command(*words), spawn.helper_environment()
        if gpus:
            environ[VISIBLE] = ",".join(gpus)
        options = {"death_signal": signal.SIGTERM, "heir": True}
        try:
            process = spawn.start_logged("its launcher", command, environ, log, **options)
        except RunError as error:
            end_without_ranks(task.path, attempt, End(State.FAILED, str(error), "launch"))
            raise
        self.running.append(Running(task, attempt, process, log, gpus=gpus or ()))

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
            with running_elsewhere.alone(task.path):
                if len(rundir.done_attempts(task.path)) > self._done[task.path]:
                    self._done[task.path] += 1
                    self._watcher.left(task, "completed by another command meanwhile")
                    return
                run = rundir.RunDir(task.path, next_attempt(task.path, task.argv))
                words = ["hires.launcher.local", str(run.path), str(run.attempt), *self._module]
                log = run.attempt_dir / file_names.LOGS / file_names.LAUNCHER_LOG
                gpus = (self._gpus_for(task) or self._gpus.names) if task.gpu_bytes else None
                self._launch(task, run.attempt, words, log, gpus)
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
            and self._gpus_for(task) is not None
        )

    def _gpus_for(self, task: FrozenRun) -> list[str] | None:
        held: collections.Counter[str] = collections.Counter()
        for run in self.running:
            held.update(dict(zip(run.gpus, run.task.gpu_bytes, strict=False)))
        return self._gpus.choose(task.gpu_bytes, held)

    def _look(self, run: Running) -> None:
        """Passes on what the ranks recorded."""
        for line in self._tails[run.task.path].read():
            self._watcher.line(run.task, line)

    def _end(self, end: Ended) -> None:
        self._done[end.task.path] += end.state == State.DONE
        self.ends.append(end)
        self._watcher.ended(end)


def _end_of(run: Running, code: int) -> End:
    """Returns how an attempt ended, as its launcher wrote it or as it looks if it could not."""
    if end := Attempt(run.task.path, run.attempt).exit:
        return end
    if run.signals:
        end = End(State.CANCELLED, "stopped before its ranks were started", started=run.started)
    else:
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )
        cause = ": ".join([f"its launcher {how}", *last_lines(run.log)[-1:]])
        end = End(State.FAILED, cause, "launch", started=run.started)
        end = replace(end, state=State.LOST, reason=None) if code < 0 else end
    end_without_ranks(run.task.path, run.attempt, end)
    return end
