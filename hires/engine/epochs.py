"""Sums up each epoch of a training.

10 images, batch 4     step   0    1    2    3    4    5
                       epoch  0    0    0|1  1    1|2  2
                       ends             1         2         a step may hold images of two

An attempt that resumes within an epoch counts the steps that earlier ones have recorded, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store.attempts import Attempt
from hires.core.store.reading import Values
from hires.core.store.step_lines import earlier_steps, epoch_text

log = logging.getLogger(__name__)


class Epochs:
    """Counts the epochs of an attempt, on every rank alike."""

    def __init__(
        self,
        config: RunConfig,
        num_images: int,
        rank: int,
        attempt: Attempt | None = None,
        step: int = 0,
    ) -> None:
        """The ``attempt`` begins at a ``step``; rank 0 reads what earlier ones have recorded."""
        self._config, self._rank = config, rank
        self.num_images = num_images
        self._is_short = 2 * config.batch > num_images
        steps: list[Values] = []
        if attempt is not None and step and rank == 0 and not self._is_short:
            steps = self._begun_steps(attempt, step)
        self._losses = [line["loss"] for line in steps if line["loss"] is not None]
        spent_s = math.fsum(line["step_s"] for line in steps if not line["rank"])
        self._began_s = time.perf_counter() - spent_s

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
        if self._is_short:
            return None
        if loss is not None:
            self._losses.append(loss)
        if not self.ends_in(step):
            return None
        totals = json.dumps([math.fsum(self._losses), len(self._losses)])
        sums, counts = zip(*map(json.loads, comm.gather_texts(totals)), strict=True)
        taken_s = time.perf_counter() - self._began_s
        self._losses, self._began_s = [], time.perf_counter()
        left = (self._config.steps - step - 1) * self._config.batch / self.num_images
        facts: dict[str, float] = {"epoch": self.of_step(step), "step": step, "epoch_s": taken_s}
        facts["left_s"] = taken_s * left
        if any(counts):
            facts["loss"] = math.fsum(sums) / sum(counts)
        if self._rank == 0:
            log.info("%s", epoch_text(facts))
        return facts

    def _begun_steps(self, attempt: Attempt, step: int) -> list[Values]:
        # The lines of all ranks of those steps of the running epoch that are done.
        first = -(-self.of_step(step - 1) * self.num_images // self._config.batch)
        lines: list[Values] = []
        with contextlib.suppress(RunError):  # a damaged line ends no training
            for earlier, done in earlier_steps(attempt):
                own = [line for line in earlier.metrics if line.get("kind") == "step"]
                lines += [line for line in own if first <= line["step"] in done]
                if done.start <= first:
                    break
        return lines
