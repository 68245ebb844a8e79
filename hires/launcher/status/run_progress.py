"""Follows the progress of a run while it runs, from what the ranks append to ``metrics.jsonl``.

A step is over when every rank has reported it, and took as long as its slowest rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core import units
from hires.core.store.reading import open_regular, parse_lines


class MetricsTail:
    """Follows a growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        """Takes the file; it may not exist yet."""
        self.path = path
        self._offset = 0

    @property
    def seen(self) -> bool:
        """Whether there was any line yet."""
        return self._offset > 0

    def read(self) -> list[dict[str, Any]]:
        """Returns the lines that were completed since the last call."""
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # the rest is still being written
        self._offset += len(whole)
        return list(parse_lines(whole))


@dataclass(frozen=True)
class FinishedStep:
    """A step that every rank has finished."""

    index: int
    """From 0."""
    step_s: float
    """Time of the slowest rank, in seconds."""
    img_per_s: float
    """Images of the whole world per second."""
    loss: float | None
    """Mean over the ranks that report one; None if none does."""


class Progress:
    """Puts the lines of all ranks together to steps."""

    def __init__(self, world: int, batch: int, steps: int) -> None:
        """Takes the number of ranks, the images per step and the number of steps."""
        self.world = world
        self.batch = batch
        self.steps = steps
        self._open: dict[int, dict[int, dict[str, Any]]] = {}

    def feed(self, line: dict[str, Any]) -> FinishedStep | None:
        """Returns the step that this line of ``metrics.jsonl`` completes, or None."""
        if line.get("kind") != "step":
            return None
        ranks = self._open.setdefault(line["step"], {})
        ranks[line["rank"]] = line
        if len(ranks) < self.world:
            return None
        del self._open[line["step"]]
        step_s = max(one["step_s"] for one in ranks.values())
        losses = [one["loss"] for one in ranks.values() if one.get("loss") is not None]
        loss = math.fsum(losses) / len(losses) if losses else None
        return FinishedStep(line["step"], step_s, self.batch / step_s if step_s > 0 else 0.0, loss)

    def text(self, step: FinishedStep) -> str:
        """Returns a plain line about a step, as ``step 3/12  418.0 ms  19.1 img/s  loss 2.301``."""
        loss = "" if step.loss is None else f"  loss {step.loss:.4g}"
        time = units.seconds(step.step_s)
        return f"step {step.index + 1}/{self.steps}  {time}  {step.img_per_s:.4g} img/s{loss}"
