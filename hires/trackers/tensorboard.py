"""Writes the numbers of a training for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hires.core.trackers import TRACKERS, TrackedRun, Tracker

FOLDER = "tensorboard"
"""In a run folder."""
_FLUSH_S = 10
"""Seconds after which the page shows a number at the latest."""


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """Event files in `tensorboard` of the run folder."""

    package = extra = "tensorboard"

    def open(self, run: TrackedRun) -> None:
        """Begins a file; steps of earlier ones that are repeated now are no longer shown."""
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        folder = str(run.folder / FOLDER)
        self._writer = make(folder, purge_step=run.first or None, flush_secs=_FLUSH_S)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes a scalar for each number."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self, status: str) -> None:
        """Writes what is left."""
        self._writer.close()
