"""Metrics of labels, any number of which an image has, and of numbers, as scikit-learn has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hires.core.evaluation_summary import (
    METRICS,
    CountsMetric,
    Evaluated,
    fsum,
    label_counts,
    wrong_if_broken,
)
from hires.core.losses import LABELS, NUMBERS


@METRICS.register("mean_ap")
class MeanAveragePrecision(CountsMetric):
    """The mean of the average precision of the classes that occur."""

    outputs, title = (LABELS,), "mAP"

    @classmethod
    def value(cls, evaluated: Evaluated) -> float:
        """Returns the mean; NaN: no class occurs."""
        return _mean([_average_precision(*pair) for pair in evaluated.rows() if any(pair[0])])


@METRICS.register("mean_f1")
class MeanF1(CountsMetric):
    """The mean of F1 of the classes that occur or are predicted, above a probability of 0.5."""

    outputs, title = (LABELS,), "F1"

    @classmethod
    def value(cls, evaluated: Evaluated) -> float:
        """Returns the mean; NaN: there is no such class."""
        counts = [label_counts(*pair) for pair in evaluated.rows()]
        return _mean([2 * hits / (actual + made) for hits, actual, made in counts if actual + made])


@METRICS.register("subset_accuracy")
class SubsetAccuracy(CountsMetric):
    """The share of images of which no class is missing or too many."""

    outputs, has_interval, title = (LABELS,), True, "all labels"

    @classmethod
    def value(cls, evaluated: Evaluated) -> float:
        """Returns the share."""
        return sum(evaluated.columns["exact"]) / evaluated.total


class _OfNumbers(CountsMetric):
    """The mean over the numbers of an image."""

    outputs, has_interval, larger_is_better = (NUMBERS,), True, False
    unit, factor, digits = "", 1.0, 4

    @classmethod
    def value(cls, evaluated: Evaluated) -> float:
        """Returns the mean."""
        return _mean([cls.of_number(*pair) for pair in evaluated.rows()])

    @classmethod
    def of_number(cls, target: Sequence[float], output: Sequence[float]) -> float:
        """Returns what one of the numbers has."""
        raise NotImplementedError


@METRICS.register("mae")
class MeanAbsoluteError(_OfNumbers):
    """The mean absolute error."""

    title = "MAE"

    @classmethod
    def of_number(cls, target: Sequence[float], output: Sequence[float]) -> float:
        """Returns the mean over images."""
        return fsum(abs(t - o) for t, o in zip(target, output, strict=True)) / len(target)


@METRICS.register("rmse")
class RootMeanSquaredError(_OfNumbers):
    """The root of the mean square of the error."""

    title = "RMSE"

    @classmethod
    def of_number(cls, target: Sequence[float], output: Sequence[float]) -> float:
        """Returns the root of the mean over images."""
        return math.sqrt(_squares(target, output) / len(target))


@METRICS.register("r2")
class Determination(_OfNumbers):
    """The coefficient of determination: 1 without error, 0 of the mean of the targets."""

    title, larger_is_better = "R2", True

    @classmethod
    def of_number(cls, target: Sequence[float], output: Sequence[float]) -> float:
        """Returns it; NaN of one image."""
        mean = fsum(target) / len(target)
        error, spread = _squares(target, output), fsum((t - mean) ** 2 for t in target)
        if len(target) < 2 or math.isnan(error):
            return math.nan
        return 1 - error / spread if spread else float(error == 0)


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values) if values else math.nan


def _squares(target: Sequence[float], output: Sequence[float]) -> float:
    return fsum((t - o) ** 2 for t, o in zip(target, output, strict=True))


def _average_precision(target: Sequence[float], output: Sequence[float]) -> float:
    # The sum over thresholds, which are the outputs, of precision times what recall gains there.
    import numpy as np  # not before: commands that evaluate nothing start without it

    scores = np.array(wrong_if_broken(target, output))
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(np.array(target)[order])
    last = np.flatnonzero(np.diff(scores[order], append=-np.inf))  # of equal scores
    gains = np.diff(hits[last], prepend=0)
    return fsum(gains * hits[last] / (last + 1)) / float(hits[-1])
