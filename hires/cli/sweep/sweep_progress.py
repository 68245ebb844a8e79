"""How far is a sweep? A bar for the points and one for each that runs; elsewhere plain lines.

Both go to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import file_names, records
from hires.core.units import seconds
from hires.launcher.local.queue_tasks import Ended, Task
from hires.launcher.status.run_progress import Progress

_PLAIN_EVERY_S = 10.0
"""How often a long planning is told of where there is no terminal."""


class PlanningProgress:
    """Tells how many points are planned."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def __call__(self, number: int, total: int) -> None:
        """Takes how many points of how many are planned."""
        now_s = time.monotonic()
        if sys.stderr.isatty():
            told = f"planning point {number + 1} of {total} ..."
            print(f"{told:<40}", end="\r", file=sys.stderr, flush=True)
        elif now_s - self._told_s > _PLAIN_EVERY_S:
            print(f"planning point {number + 1} of {total}", file=sys.stderr, flush=True)
            self._told_s = now_s

    def done(self) -> None:
        """Clears the line."""
        if sys.stderr.isatty():
            print(f"{'':<40}", end="\r", file=sys.stderr, flush=True)


class SweepProgress:
    """Shows the attempts of a sweep; the queue tells it what happens."""

    def __init__(self, total: int, configs: Mapping[Path, RunConfig]) -> None:
        """Takes the number of attempts, and the config of every run folder."""
        self.total = total
        self._configs = configs
        self.count = 0
        self._steps: dict[str, Progress] = {}
        self._bars = _Bars(total) if sys.stderr.isatty() else None

    def __enter__(self) -> SweepProgress:
        """Begins to draw."""
        if self._bars:
            self._bars.drawing.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the drawing, however the sweep ended."""
        if self._bars:
            self._bars.drawing.stop()

    def started(self, task: Task, attempt: int) -> None:
        """An attempt was started."""
        config = self._configs[task.path]
        self._steps[str(task.path)] = Progress(task.ranks, config.batch, config.steps)
        if self._bars:
            self._bars.add(task, config.steps)
        else:
            self._say(f"{task.path.name} a{attempt}: started")

    def line(self, task: Task, line: dict[str, Any]) -> None:
        """A rank of a running attempt recorded something."""
        progress = self._steps.get(str(task.path))
        step = progress.feed(line) if progress else None
        if step is not None and self._bars:
            self._bars.show(task, step.index + 1, f"{step.img_per_s:.4g} img/s")

    def ended(self, end: Ended) -> None:
        """An attempt ended, or could not be made."""
        self.count += 1
        if self._bars:
            self._bars.remove(end.task)
        attempt = "" if end.attempt is None else f" a{end.attempt}"
        text = f"[{self.count}/{self.total}] {end.task.path.name}{attempt}: {end.state}"
        text += f", {_rate(end)}" if end.state == "done" else ""
        self._say(f"{text}, {seconds(end.wall_s)}" + (f": {end.cause}" if end.cause else ""))
        if end.state in ("failed", "lost") and end.attempt is not None:
            self._say(f"    logs: {file_names.attempt_dir(end.task.path, end.attempt) / 'logs'}")

    def left(self, task: Task, why: str) -> None:
        """A task is left to somebody else, or was completed by others."""
        self.count += 1
        if self._bars:
            self._bars.remove(task)
        self._say(f"[{self.count}/{self.total}] {task.path.name} is left out: {why}")

    def _say(self, text: str) -> None:
        """Prints a line, above the bars if there are any."""
        if self._bars:
            self._bars.drawing.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _rate(end: Ended) -> str:
    """Returns the throughput of a complete attempt, in words."""
    record = None
    with contextlib.suppress(RunError):
        record = records.read_record(file_names.attempt_dir(end.task.path, end.attempt or 0))
    rates = record["throughput"]["img_per_s"] if record else None
    return f"{rates['median']:.4g} img/s" if rates else "no throughput"


class _Bars:
    """Bars of rich."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Drawing

        self.drawing = Drawing(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=Console(file=sys.stderr),
        )
        self._all = self.drawing.add_task("attempts", total=total, facts="")
        self._tasks: dict[str, Any] = {}

    def add(self, task: Task, steps: int) -> None:
        """Draws a run that begins."""
        bar = self.drawing.add_task(task.path.name, total=steps, facts="starting the ranks")
        self._tasks[str(task.path)] = bar

    def show(self, task: Task, steps: int, facts: str) -> None:
        """Draws how far a run is."""
        self.drawing.update(self._tasks[str(task.path)], completed=steps, facts=facts)

    def remove(self, task: Task) -> None:
        """Takes a run away that has ended, and counts it."""
        bar = self._tasks.pop(str(task.path), None)
        if bar is not None:
            self.drawing.remove_task(bar)
        self.drawing.advance(self._all)
