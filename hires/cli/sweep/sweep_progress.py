"""Shows the progress of a sweep: bars on a terminal, elsewhere plain lines.

Both go to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hires.cli.screens.progress_bar import Bars, Drawn
from hires.cli.screens.screen import print_activity
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import file_names, records
from hires.core.units import seconds
from hires.launcher.local.queue_tasks import Ended, Task
from hires.launcher.status.run_progress import Progress

_PLAIN_EVERY_S = 10.0
"""How often a long planning prints a line where there is no terminal."""


class PlanningProgress(contextlib.AbstractContextManager["PlanningProgress"]):
    """Shows how many points are planned."""

    def __init__(self) -> None:
        self._printed_s = time.monotonic()

    def __call__(self, number: int, total: int) -> None:
        """Shows that a point, of all points, is planned next."""
        print_activity(f"planning point {number + 1} of {total} ...")
        now_s = time.monotonic()
        if not sys.stderr.isatty() and now_s - self._printed_s > _PLAIN_EVERY_S:
            print(f"planning point {number + 1} of {total}", file=sys.stderr, flush=True)
            self._printed_s = now_s

    def __exit__(self, *error: object) -> None:
        """Clears the line."""
        print_activity("")


class SweepProgress(Drawn):
    """Shows the attempts of a sweep: a bar for all, and one for each that runs."""

    def __init__(self, total: int, configs: Mapping[Path, RunConfig]) -> None:
        """Takes the number of attempts, and the config of every run folder."""
        self.total = total
        self._configs = configs
        self.count = 0
        self._steps: dict[Path, Progress] = {}
        self._bars = Bars(sys.stderr) if sys.stderr.isatty() else None
        if self._bars:
            self._bars.add("attempts", total)

    def started(self, task: Task, attempt: int) -> None:
        """An attempt was started."""
        config = self._configs[task.path]
        self._steps[task.path] = Progress(task.ranks, config.batch, config.steps)
        if self._bars:
            self._bars.add(task.path.name, config.steps, "starting the ranks")
        else:
            self._print(f"{task.path.name} a{attempt}: started")

    def line(self, task: Task, line: dict[str, Any]) -> None:
        """A rank of a running attempt recorded something."""
        progress = self._steps.get(task.path)
        step = progress.feed(line) if progress else None
        if step is not None and self._bars:
            self._bars.show(task.path.name, step.index + 1, f"{step.img_per_s:.4g} img/s")

    def ended(self, end: Ended) -> None:
        """An attempt ended, or could not be made."""
        attempt = "" if end.attempt is None else f" a{end.attempt}"
        text = f"{end.task.path.name}{attempt}: {end.state}"
        text += f", {_rate(end)}" if end.state == "done" else ""
        text += f", {seconds(end.wall_s)}" + (f": {end.cause}" if end.cause else "")
        self._count(end.task, text)
        if end.state in ("failed", "lost") and end.attempt is not None:
            logs = file_names.attempt_dir(end.task.path, end.attempt) / file_names.LOGS
            self._print(f"    logs: {logs}")

    def left(self, task: Task, why: str) -> None:
        """A task is left to another process, or was completed by one."""
        self._count(task, f"{task.path.name} is left out: {why}")

    def _count(self, task: Task, text: str) -> None:
        self.count += 1
        if self._bars:
            self._bars.remove(task.path.name)
            self._bars.show("attempts", self.count)
        self._print(f"[{self.count}/{self.total}] {text}")

    def _print(self, text: str) -> None:
        """Prints a line, above the bars if there are any."""
        if self._bars:
            self._bars.print(text)
        else:
            print(text, file=sys.stderr, flush=True)


def _rate(end: Ended) -> str:
    """Returns the throughput of a complete attempt, in words."""
    record = None
    with contextlib.suppress(RunError):
        record = records.read_record(file_names.attempt_dir(end.task.path, end.attempt or 0))
    rates = record["throughput"]["img_per_s"] if record else None
    return f"{rates['median']:.4g} img/s" if rates else "no throughput"
