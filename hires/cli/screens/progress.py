"""Shows the progress of a run or a sweep: bars on a terminal, elsewhere a plain line now and then.

Both go to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hires.cli.screens.screen import print_activity
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import file_names, records
from hires.core.units import seconds
from hires.launcher.local.local_queue import Ended, PlannedAttempt
from hires.launcher.status.run_progress import RunProgress

_PLAIN_EVERY_S = 2.0
_PLAIN_SHARE = 0.05
"""Plain lines come at most every 2 s, and every twentieth of the time so far, so that the log of a
long run stays short; the first and the last step always have theirs."""
_PLANNING_EVERY_S = 10.0
"""How often a long planning prints a line where there is no terminal."""


class Bars(contextlib.AbstractContextManager[Any]):
    """Progress bars of rich, by name, on a terminal; elsewhere none."""

    def __init__(self, stream: TextIO, remaining: bool = False) -> None:
        """Takes where to draw, and whether to show the remaining time."""
        self.stream, self.drawn = stream, stream.isatty()
        self._tasks: dict[str, Any] = {}
        if self.drawn:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Drawing

            columns = [TextColumn("{task.description}", markup=False), BarColumn()]
            columns += [MofNCompleteColumn(), *([TimeRemainingColumn()] if remaining else [])]
            facts = TextColumn("{task.fields[facts]}", markup=False)
            self._drawing = Drawing(*columns, facts, console=Console(file=stream))

    def __enter__(self) -> Any:
        if self.drawn:
            self._drawing.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.drawn:
            self._drawing.stop()

    def add(self, name: str, total: int, facts: str = "") -> None:
        """Adds a bar."""
        if self.drawn:
            self._tasks[name] = self._drawing.add_task(name, total=total, facts=facts)

    def show(self, name: str, completed: int, facts: str = "") -> None:
        """Draws how far a bar is."""
        if self.drawn:
            self._drawing.update(self._tasks[name], completed=completed, facts=facts)

    def remove(self, name: str) -> None:
        """Removes a bar, if there is one of that name."""
        if name in self._tasks:
            self._drawing.remove_task(self._tasks.pop(name))

    def print(self, text: str) -> None:
        """Prints a line, above the bars if there are any."""
        if self.drawn:
            self._drawing.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)


class StepProgress(Bars):
    """Shows the steps of one run; call it with every line of ``metrics.jsonl``."""

    def __init__(self, world: int, batch: int, steps: int, stream: TextIO | None = None) -> None:
        """Takes the number of ranks, images per step, steps, and where to draw."""
        super().__init__(stream or sys.stderr, remaining=True)
        self.progress = RunProgress(world, batch, steps)
        self.add("steps", steps, "starting the ranks")
        self._began = time.monotonic()
        self._printed_at = 0.0

    def __call__(self, line: dict[str, Any]) -> None:
        """Takes one line of ``metrics.jsonl`` into account; lines of other kinds are ignored."""
        step = self.progress.feed(line)
        if step is None:
            return
        loss = "" if step.loss is None else f"  loss {step.loss:.4g}"
        self.show("steps", step.index + 1, f"{step.img_per_s:.4g} img/s{loss}")
        now = time.monotonic()
        wait_s = max(_PLAIN_EVERY_S, _PLAIN_SHARE * (now - self._began))
        due = step.index in (0, self.progress.steps - 1) or now - self._printed_at >= wait_s
        if due and not self.drawn:
            self.print(self.progress.text(step))
            self._printed_at = time.monotonic()


class PlanningProgress(contextlib.AbstractContextManager["PlanningProgress"]):
    """Shows how many points of a sweep are planned."""

    def __init__(self) -> None:
        self._printed_s = time.monotonic()

    def __call__(self, number: int, total: int) -> None:
        """Shows that a point, of all points, is planned next."""
        print_activity(f"planning point {number + 1} of {total} ...")
        now_s = time.monotonic()
        if not sys.stderr.isatty() and now_s - self._printed_s > _PLANNING_EVERY_S:
            print(f"planning point {number + 1} of {total}", file=sys.stderr, flush=True)
            self._printed_s = now_s

    def __exit__(self, *error: object) -> None:
        print_activity("")


class SweepProgress(Bars):
    """Shows the attempts of a sweep: a bar for all, and one for each that runs."""

    def __init__(self, total: int, configs: Mapping[Path, RunConfig]) -> None:
        """Takes the number of attempts, and the config of every run folder."""
        super().__init__(sys.stderr)
        self.total = total
        self.count = 0
        self._configs = configs
        self._steps: dict[Path, RunProgress] = {}
        self.add("attempts", total)

    def started(self, task: PlannedAttempt, attempt: int) -> None:
        """An attempt was started."""
        config = self._configs[task.path]
        self._steps[task.path] = RunProgress(task.ranks, config.batch, config.steps)
        self.add(task.path.name, config.steps, "starting the ranks")
        if not self.drawn:
            self.print(f"{task.path.name} a{attempt}: started")

    def line(self, task: PlannedAttempt, line: dict[str, Any]) -> None:
        """A rank of a running attempt recorded something."""
        progress = self._steps.get(task.path)
        step = progress.feed(line) if progress else None
        if step is not None:
            self.show(task.path.name, step.index + 1, f"{step.img_per_s:.4g} img/s")

    def ended(self, end: Ended) -> None:
        """An attempt ended, or could not be made."""
        path, folder = end.task.path, None
        text = path.name
        if end.attempt is not None:
            text += f" a{end.attempt}"
            folder = file_names.attempt_dir(path, end.attempt)
        text += f": {end.state}"
        if end.state == "done":
            record = None
            with contextlib.suppress(RunError):
                record = records.read_record(folder or path)
            rates = record["throughput"]["img_per_s"] if record else None
            text += f", {rates['median']:.4g} img/s" if rates else ", no throughput"
        text += f", {seconds(end.wall_s)}" + (f": {end.cause}" if end.cause else "")
        self._count(end.task, text)
        if end.state in ("failed", "lost") and folder is not None:
            self.print(f"    logs: {folder / file_names.LOGS}")

    def left(self, task: PlannedAttempt, why: str) -> None:
        """A task is left to another process, or was completed by one."""
        self._count(task, f"{task.path.name} is left out: {why}")

    def _count(self, task: PlannedAttempt, text: str) -> None:
        self.count += 1
        self.remove(task.path.name)
        self.show("attempts", self.count)
        self.print(f"[{self.count}/{self.total}] {text}")
