"""Sums up each epoch of a training.

10 images, batch 4     step   0    1    2    3    4    5
                       epoch  0    0    0|1  1    1|2  2
                       ends             1         2         a step may hold images of two
"""

from __future__ import annotations

import json
import logging
import math
import time

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.store.step_lines import epoch_text

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
