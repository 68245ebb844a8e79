"""Shows the progress of a run: a bar on a terminal, elsewhere a plain line now and then.

Both go to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO, TypeVar

from hires.launcher.status.run_progress import Progress

_Drawn = TypeVar("_Drawn", bound="Drawn")
_PLAIN_EVERY_S = 2.0
_PLAIN_SHARE = 0.05
"""Plain lines come at most every 2 s, and every twentieth of the time so far, so that the log of a
long run stays short; the first and the last step always have theirs."""


class Bars:
    """Progress bars of rich, by name."""

    def __init__(self, stream: TextIO, remaining: bool = False) -> None:
        """Takes where to draw, and whether to show the remaining time."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Drawing

        columns = [TextColumn("{task.description}", markup=False), BarColumn()]
        columns += [MofNCompleteColumn(), *([TimeRemainingColumn()] if remaining else [])]
        facts = TextColumn("{task.fields[facts]}", markup=False)
        self._drawing = Drawing(*columns, facts, console=Console(file=stream))
        self.start, self.stop = self._drawing.start, self._drawing.stop
        self._tasks: dict[str, Any] = {}

    def add(self, name: str, total: int, facts: str = "") -> None:
        """Adds a bar."""
        self._tasks[name] = self._drawing.add_task(name, total=total, facts=facts)

    def show(self, name: str, completed: int, facts: str = "") -> None:
        """Draws how far a bar is."""
        self._drawing.update(self._tasks[name], completed=completed, facts=facts)

    def remove(self, name: str) -> None:
        """Removes a bar, if there is one of that name."""
        if name in self._tasks:
            self._drawing.remove_task(self._tasks.pop(name))

    def print(self, text: str) -> None:
        """Prints a line above the bars."""
        self._drawing.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Drawn:
    """Draws its bars, if it has any, while its block runs."""

    _bars: Bars | None

    def __enter__(self: _Drawn) -> _Drawn:
        """Begins to draw."""
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the drawing, however the block ended."""
        if self._bars:
            self._bars.stop()


class StepProgress(Drawn):
    """Shows the steps of one run; call it with every line of ``metrics.jsonl``."""

    def __init__(self, world: int, batch: int, steps: int, stream: TextIO | None = None) -> None:
        """Takes the number of ranks, images per step, steps, and where to draw."""
        self.progress = Progress(world, batch, steps)
        self.stream = stream or sys.stderr
        self._bars = Bars(self.stream, remaining=True) if self.stream.isatty() else None
        if self._bars:
            self._bars.add("steps", steps, "starting the ranks")
        self._began = time.monotonic()
        self._printed_at = 0.0

    def __call__(self, line: dict[str, Any]) -> None:
        """Takes one line of ``metrics.jsonl`` into account; lines of other kinds are ignored."""
        step = self.progress.feed(line)
        if step is None:
            return
        if self._bars:
            loss = "" if step.loss is None else f"  loss {step.loss:.4g}"
            self._bars.show("steps", step.index + 1, f"{step.img_per_s:.4g} img/s{loss}")
        elif step.index in (0, self.progress.steps - 1) or self._is_due():
            print(self.progress.text(step), file=self.stream, flush=True)
            self._printed_at = time.monotonic()

    def _is_due(self) -> bool:
        now = time.monotonic()
        wait_s = max(_PLAIN_EVERY_S, _PLAIN_SHARE * (now - self._began))
        return now - self._printed_at >= wait_s
