"""Writes the numbers of a training for TensorBoard while it runs: ``measure.tensorboard``.

    results/CAMPAIGN/RUN/tensorboard/events.out.tfevents...     of rank 0, one file an attempt

An attempt that goes on from a checkpoint hides what others wrote behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.config.validate_config import METRICS
from hires.core.errors import ConfigError
from hires.plan.hardware import NO_TENSORBOARD

FOLDER = "tensorboard"
"""In a run folder."""
_FLUSH_S = 10
"""Seconds after which the page shows a number at the latest."""


class Scalars:
    """Takes what ranks know of each step; rank 0 writes it. All ranks make the same calls."""

    def __init__(self, config: RunConfig, run_dir: Path, first: int, rank: int) -> None:
        self._batch, self._holders = config.batch, 0.0
        self._writer: Any = None
        if rank == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(f"measure.tensorboard: {NO_TENSORBOARD} ({error})") from None
            make: Any = SummaryWriter
            folder = str(run_dir / FOLDER)
            self._writer = make(folder, purge_step=first or None, flush_secs=_FLUSH_S)

    def step(self, step: int, step_s: float, loss: float | None, facts: Mapping[str, Any]) -> None:
        """Takes a step of this rank: its seconds, its loss, and its rate, scale and norm."""
        if not self._holders:  # as many ranks know the loss of their replica as in every step
            self._holders = comm.sum_all(0.0 if loss is None else 1.0)
        mean = comm.sum_all(0.0 if loss is None else loss) / self._holders
        numbers = {"train/loss": mean, "train/images_per_s": self._batch / step_s}
        self._write(step, numbers | {f"train/{key}": float(one) for key, one in facts.items()})

    def evaluation(self, step: int, facts: Mapping[str, Any]) -> None:
        """Takes what an evaluation behind a step has found."""
        found = {key: facts[key] for key in METRICS if facts.get(key) is not None}
        self._write(step, {f"validation/{key}": float(one) for key, one in found.items()})

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items() if self._writer is not None else ():
            if math.isfinite(number):
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
