"""Metrics of classes, of images or of pixels."""

from __future__ import annotations

from collections.abc import Sequence

from hires.core.evaluation_summary import CLASSES, METRICS, PIXELS, CountsMetric, Evaluated, fsum


@METRICS.register("top1")
class Top1(CountsMetric):
    """The share of images or pixels whose class has the highest score."""

    outputs, has_interval, title = (CLASSES, PIXELS), True, "top-1"

    @classmethod
    def value(cls, evaluated: Evaluated) -> float:
        """Returns the share."""
        if evaluated.kind == PIXELS:
            return sum(evaluated.columns["correct"]) / evaluated.total
        return _among_first(1, evaluated)


@METRICS.register("top5")
class Top5(CountsMetric):
    """The share of images whose class has one of the five highest scores."""

    outputs, title = (CLASSES,), "top-5"

    @classmethod
    def fits(cls, shape: Sequence[int]) -> bool:
        """Whether there are more classes than that."""
        return shape[1] > 5

    @classmethod
    def value(cls, evaluated: Evaluated) -> float:
        """Returns the share."""
        return _among_first(5, evaluated)


def _among_first(number: int, evaluated: Evaluated) -> float:
    return sum(place < number for place in evaluated.columns["place"]) / evaluated.total


class _MeanOfClasses(CountsMetric):
    """The mean of a share of each class that occurs."""

    of = ""

    @classmethod
    def value(cls, evaluated: Evaluated) -> float:
        """Returns the mean."""
        shares = [one[cls.of] for one in evaluated.classes]
        return fsum(shares) / len(shares)


@METRICS.register("mean_recall")
class MeanRecall(_MeanOfClasses):
    """The mean share of each class that was found."""

    outputs, title, of = (CLASSES, PIXELS), "recall", "recall"


@METRICS.register("mean_iou")
class MeanIou(_MeanOfClasses):
    """The mean intersection over union of the classes."""

    outputs, has_interval, title, of = (PIXELS,), True, "IoU", "iou"


@METRICS.register("mean_dice")
class MeanDice(_MeanOfClasses):
    """The mean Dice coefficient of the classes."""

    outputs, has_interval, title, of = (PIXELS,), True, "Dice", "dice"
