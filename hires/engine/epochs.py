"""Sums up each epoch of a training, and writes its numbers for TensorBoard while it runs.

10 images, batch 4     step   0    1    2    3    4    5
                       epoch  0    0    0|1  1    1|2  2
                       ends             1         2         a step may hold images of two
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.evaluation_metrics import LOSS, METRICS
from hires.core.store.step_lines import epoch_text
from hires.plan.hardware import NO_TENSORBOARD

log = logging.getLogger(__name__)


class Epochs:
    """Counts the epochs of an attempt, on every rank alike."""

    def __init__(self, config: RunConfig, num_images: int, rank: int) -> None:
        self._config, self._rank = config, rank
        self.num_images = num_images
        self._began_s = time.perf_counter()
        self._losses: list[float] = []

    def of_step(self, step: int) -> int:
        """Returns how many epochs are over after a step."""
        return (step + 1) * self._config.batch // self.num_images

    def ends_in(self, step: int) -> bool:
        """Whether an epoch ends in a step."""
        return self.of_step(step) > self.of_step(step - 1)

    def add(self, step: int, loss: float | None) -> dict[str, float] | None:
        """Takes the loss of a step on this rank; returns what to note of an epoch that ends in it.

        All ranks call it together. Epochs of a single step have their step's line.
        """
        if 2 * self._config.batch > self.num_images:
            return None
        if loss is not None:
            self._losses.append(loss)
        if not self.ends_in(step):
            return None
        own = [math.fsum(self._losses) / len(self._losses)] if self._losses else []
        every = [x for text in comm.gather_texts(json.dumps(own)) for x in json.loads(text)]
        taken_s = time.perf_counter() - self._began_s
        self._losses, self._began_s = [], time.perf_counter()
        left = (self._config.steps - step - 1) * self._config.batch / self.num_images
        facts: dict[str, float] = {"epoch": self.of_step(step), "step": step, "epoch_s": taken_s}
        facts["left_s"] = taken_s * left
        if every:
            facts["loss"] = math.fsum(every) / len(every)
        if self._rank == 0:
            log.info("%s", epoch_text(facts))
        return facts


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
        found = {key: facts[key] for key in (LOSS, *METRICS) if facts.get(key) is not None}
        self._write(step, {f"validation/{key}": float(one) for key, one in found.items()})

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items() if self._writer is not None else ():
            if math.isfinite(number):
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
