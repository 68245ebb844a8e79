"""Lists the losses: what the config and the plan must have of each, without torch.

A loss is a function of a few sums over the output, so tiles and shards compute their own sums, and
one message brings these together (:mod:`hires.parallel.loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

IMAGES, CLASSES = "images", "classes"


def _mean(classes: int) -> int:
    return 2  # the sum of the terms, and how many count


def _dice(classes: int) -> int:
    return 2 * classes


@dataclass(frozen=True)
class Loss:
    """What the config and the plan need of a loss."""

    targets: str
    """``images`` (each has the size of the output), or ``classes`` (one for each image, which
    counts for every pixel of an output with rows and columns)."""
    num_sums: Callable[[int], int] = _mean
    """From the channels of the output to the numbers that each tile contributes."""


LOSSES = {
    "cross_entropy": Loss(CLASSES),
    "bce": Loss(CLASSES),
    "dice": Loss(CLASSES, _dice),
    "l1": Loss(IMAGES),
    "l2": Loss(IMAGES),
    "custom": Loss(CLASSES),
}
"""Value of ``loss`` -> the loss; of ``custom`` ``loss.targets`` says what it compares with."""
