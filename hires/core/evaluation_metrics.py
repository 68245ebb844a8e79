"""Defines a metric: one class, of which the config, the plan and reports read facts without torch.

A metric is the mean over samples of a number that each sample has (:class:`SampleMetric`), or it
follows from how often each class was taken for which (:class:`CountsMetric`). Either way tiles and
ranks bring sums together that no order changes. To add one: a module in ``hires.metrics`` with its
class, and a test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hires.core.losses import LABELS, NUMBERS
from hires.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

CLASSES, PIXELS, IMAGES = "classes", "pixels", "images"
"""What one output holds: a class for each image, one for each pixel, or an image."""
ROW_KINDS = LABELS, NUMBERS
"""Also, (n, C): whether an image has each of the classes, or its numbers."""
LOSS = "loss"
"""The number of every evaluation that is no metric; less of it is better."""


class EvaluationMetric:
    """A number of an evaluation, which ``validate.metric`` may name."""

    outputs: ClassVar[tuple[str, ...]] = ()
    """Of which it says something: ``classes``, ``pixels``, ``images``, ``labels``, ``numbers``."""
    larger_is_better: ClassVar[bool] = True
    has_interval: ClassVar[bool] = False
    """Whether an evaluation adds its 95 % interval, NAME_ci95."""
    title: ClassVar[str] = ""
    """Heading of its column."""
    unit: ClassVar[str] = ""
    factor: ClassVar[float] = 1.0
    """By which the number is multiplied where it is shown."""
    digits: ClassVar[int] = 4

    @classmethod
    def fits(cls, shape: Sequence[int]) -> bool:
        """Whether an output of a shape, (n, C, ...), has it."""
        return True


class SampleMetric(EvaluationMetric):
    """The mean over the samples of a number of each; of ``classes`` or ``images``."""

    has_interval = True

    def __init_subclass__(cls) -> None:
        assert PIXELS not in cls.outputs, f"{cls.__name__}: pixels are judged by their counts"

    reach: ClassVar[int] = 0
    """Of images in tiles: the pixels around its own that a tile needs to count them."""

    @classmethod
    def count(cls, output: Tensor, target: Tensor) -> float:
        """Returns what a sample, or a tile of it, adds to its sum.

        Args:
            output: the scores, (C), or the image, (C, h, w), from -2 (black) to 2 (white), with
                ``reach`` pixels around those that count where the image has them.
            target: the class, or the wanted image.
        """
        raise NotImplementedError

    @classmethod
    def of_sample(cls, total: float, shape: Sequence[int]) -> float:
        """Returns the number of a sample from its sum; ``shape`` is that of its output."""
        return total


class Evaluated(NamedTuple):
    """What a pass has counted, as far as metrics of counts read it."""

    kind: str
    total: int
    """Images or pixels that have a class."""
    columns: Mapping[str, Sequence[float]]
    """Of each sample, by the names of ``evaluation_summary.ROWS``."""
    classes: Sequence[Mapping[str, Any]]
    """Count, precision, recall and, of pixels, IoU and Dice of each class that occurs."""

    def rows(self) -> list[tuple[Sequence[float], Sequence[float]]]:
        """Returns targets and outputs of all samples, for each class or number of an output."""
        width = sum(name.startswith("target_") for name in self.columns)
        return [(self.columns[f"target_{k}"], self.columns[f"output_{k}"]) for k in range(width)]


class CountsMetric(EvaluationMetric):
    """A number that follows from all samples; a share, from 0 to 1, of whatever has classes."""

    unit, factor, digits = "%", 100.0, 2

    @classmethod
    def value(cls, evaluated: Evaluated) -> float:
        """Returns the number."""
        raise NotImplementedError


METRICS: Registry[type[EvaluationMetric]] = Registry("metric", "hires.metrics")
"""Name in a summary and in ``validate.metric`` -> the metric."""


def metrics_of(kind: str, shape: Sequence[int]) -> dict[str, type[EvaluationMetric]]:
    """Returns those of a kind of outputs, of a shape (n, C, ...)."""
    every = ((name, METRICS[name]) for name in METRICS)
    return {name: one for name, one in every if kind in one.outputs and one.fits(shape)}


def is_larger_better(name: str) -> bool:
    """Whether more of a metric, or of the loss, is better."""
    return name != LOSS and METRICS[name].larger_is_better


def sample_metrics(kind: str, shape: Sequence[int]) -> dict[str, type[SampleMetric]]:
    """Returns those of :func:`metrics_of` that count each sample, in the order of a row."""
    every = metrics_of(kind, shape).items()
    return {name: one for name, one in every if issubclass(one, SampleMetric)}


def fsum(values: Iterable[float]) -> float:
    """Returns the exact sum, rounded once; NaN if a value is not finite."""
    held = list(values)
    return math.fsum(held) if all(map(math.isfinite, held)) else math.nan


def wrong_if_broken(target: Sequence[float], output: Sequence[float]) -> list[float]:
    """Returns the probabilities of a class; where they are not finite, those that are wrong."""
    return [o if math.isfinite(o) else 1 - t for t, o in zip(target, output, strict=True)]


def label_counts(target: Sequence[float], output: Sequence[float]) -> tuple[int, int, int]:
    """Returns how many images have a class and are found, have it, and are said to have it."""
    chosen = [o > 0.5 for o in wrong_if_broken(target, output)]
    return sum(map(bool.__and__, map(bool, target), chosen)), sum(map(bool, target)), sum(chosen)
