"""Lists the losses: another mean of independent terms is an entry here, and a test."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """What the config, the plan and the ranks need of a loss."""

    function: str
    """Name in ``torch.nn.functional``, or ``module:name``. It takes ``reduction``, and its mean is
    over terms that do not depend on each other: tiles and shards compute their own, and add up."""
    targets: str
    """``images`` (each has the size of the output), or ``classes`` (one for each image, which
    counts for every pixel of an output with rows and columns)."""

    def num_terms(self, shape: list[int]) -> int:
        """Returns how many terms the mean of an output of a shape, (n, C, ...), is over."""
        return math.prod(shape) // (shape[1] if self.targets == "classes" else 1)


LOSSES = {
    "cross_entropy": Loss("cross_entropy", "classes"),
    "l1": Loss("l1_loss", "images"),
}
"""Value of ``task.loss`` -> the loss."""
