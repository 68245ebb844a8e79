"""How far is a run? A bar on a terminal, elsewhere a plain line now and then.

Both go to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

from hires.launcher.status.run_progress import FinishedStep, Progress

_PLAIN_EVERY_S = 2.0
_PLAIN_SHARE = 0.05
"""Plain lines come at most every 2 s, and every twentieth of the time so far, so that the log of a
long run stays short; the first and the last step always have theirs."""


class StepProgress:
    """Shows the steps of one run; call it with every line of ``metrics.jsonl``."""

    def __init__(self, world: int, batch: int, steps: int, stream: TextIO | None = None) -> None:
        """Takes the number of ranks, images per step, steps, and where to draw."""
        self.progress = Progress(world, batch, steps)
        self.stream = stream or sys.stderr
        self._bar = _Bar(steps, self.stream) if self.stream.isatty() else None
        self._began = time.monotonic()
        self._printed_at = 0.0

    def __enter__(self) -> StepProgress:
        """Begins to draw."""
        if self._bar:
            self._bar.drawing.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the drawing, however the run ended."""
        if self._bar:
            self._bar.drawing.stop()

    def __call__(self, line: dict[str, Any]) -> None:
        """Takes one line of ``metrics.jsonl`` into account; lines of other kinds are ignored."""
        step = self.progress.feed(line)
        if step is None:
            return
        if self._bar:
            self._bar.show(step)
        elif step.index in (0, self.progress.steps - 1) or self._is_due():
            print(self.progress.text(step), file=self.stream, flush=True)
            self._printed_at = time.monotonic()

    def _is_due(self) -> bool:
        """Whether the last plain line is long enough ago."""
        now = time.monotonic()
        wait_s = max(_PLAIN_EVERY_S, _PLAIN_SHARE * (now - self._began))
        return now - self._printed_at >= wait_s


class _Bar:
    """A bar of rich."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Drawing

        self.drawing = Drawing(
            TextColumn("steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            console=Console(file=stream),
        )
        self._task = self.drawing.add_task("steps", total=steps, facts="starting the ranks")

    def show(self, step: FinishedStep) -> None:
        """Draws a step that all ranks have finished."""
        loss = "" if step.loss is None else f"  loss {step.loss:.4g}"
        facts = f"{step.img_per_s:.4g} img/s{loss}"
        self.drawing.update(self._task, completed=step.index + 1, facts=facts)
