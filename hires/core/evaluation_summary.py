"""Defines metrics, and computes accuracies from what ranks counted in one pass over a data set.

    rank, step     rows of the samples that it saw, counts of (class, predicted class)
    all of them -> by sample, in the order of the data set -> one summary

Counts are integers, and sums of fractions are exact (``math.fsum``), so no order of ranks, tiles or
microbatches changes a digit. No torch: the config, the plan, rank 0 and readers of results share
it.

A metric is the mean over samples of a number that each sample has (:class:`SampleMetric`), or it
follows from how often each class was taken for which (:class:`CountsMetric`). To add one: a module
in ``hires.metrics`` with its class, and a test.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hires.core.errors import RunError
from hires.core.losses import LABELS, NUMBERS
from hires.core.registry import Registry

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


ROWS = {
    CLASSES: ("loss", "label", "predicted", "place", "score"),
    PIXELS: ("loss", "pixels", "correct"),
    IMAGES: ("loss",),
    LABELS: ("loss", "exact"),
    NUMBERS: ("loss",),
}
"""What a row holds behind the sample's number, and before what its metrics count. ``place``: how
many classes scored higher than the label; ``exact``: whether all labels are right; labels and
numbers have ``target_K`` and ``output_K`` of each behind them. Tiles of one sample have a row each,
which are added."""
MOST_LISTED = 64
"""Classes up to which a confusion matrix is kept."""
Z95 = 1.959963984540054
"""Of the normal distribution: 95 % lie within so many standard deviations."""

Numbers = Sequence[float]
Counts = Mapping[tuple[int, int], int]
"""(class, predicted class) -> pixels or images; -1 is predicted where the output is not finite."""


def num_classes(shape: Sequence[int]) -> int:
    """Returns the classes of an output of a shape, (n, C, ...): one score is that of the second."""
    return max(2, shape[1])


def one_pass(length: int, batch: int) -> int:
    """Returns how many steps one pass over a data set takes."""
    return -(-length // batch)


def by_sample(
    kind: str, rows: Iterable[Numbers], num_samples: int, done: str = "evaluated"
) -> list[list[float]]:
    """Returns one row of :data:`ROWS` for each sample of a data set, in order.

    RunError: a sample has no row, or one of several that cannot be added. ``done`` is what ranks
    did with it, for the message.
    """
    parts: dict[int, list[Numbers]] = collections.defaultdict(list)
    for sample, *numbers in rows:
        parts[int(sample)].append(numbers)
    wanted = range(num_samples)
    for missing in (sample for sample in wanted if sample not in parts):
        raise RunError(f"no rank {done} sample {missing} of {num_samples}")
    for other in parts.keys() - {*wanted}:
        raise RunError(f"a rank {done} sample {other}, and there are {num_samples}, from 0 on")
    if kind in (PIXELS, IMAGES):
        return [_added(parts[sample]) for sample in range(num_samples)]
    for sample, held in parts.items():
        if len(held) > 1:
            raise RunError(f"sample {sample} was {done} {len(held)} times")
    return [[*parts[sample][0]] for sample in range(num_samples)]


def _added(rows: list[Numbers]) -> list[float]:
    return [sum(c) if isinstance(c[0], int) else fsum(c) for c in zip(*rows, strict=True)]


def columns_of(
    kind: str, samples: Sequence[Numbers], shape: Sequence[int]
) -> dict[str, list[float]]:
    """Returns what each sample has: what :data:`ROWS` names, and the numbers of its metrics.

    ``samples`` are those of :func:`by_sample`, ``shape`` that of an output, (n, C, ...).
    """
    metrics = sample_metrics(kind, shape)
    names = [*ROWS[kind], *metrics]
    if kind in ROW_KINDS:
        names += [f"{what}_{k}" for what in ("target", "output") for k in range(shape[1])]
    columns = zip(names, zip(*samples, strict=True), strict=True)
    held = {name: [*values] for name, values in columns}
    for name, metric in metrics.items():
        held[name] = [metric.of_sample(one, shape[1:]) for one in held[name]]
    return held


def summary(
    kind: str,
    columns: Mapping[str, Sequence[Any]],
    counts: Counts,
    names: Sequence[str],
    shape: Sequence[int],
) -> dict[str, Any]:
    """Returns the accuracies of a data set as plain values; fractions are from 0 to 1.

    ``columns`` and ``shape`` are those of :func:`columns_of`, ``names`` those of all classes.
    """
    images = total = len(columns["loss"])
    made: dict[str, Any] = {"kind": kind, "images": images}
    if kind == CLASSES:
        counts = collections.Counter(zip(columns["label"], columns["predicted"], strict=True))
    elif kind == PIXELS:
        made["pixels"] = total = int(sum(columns["pixels"]))
        if not total:
            raise RunError(
                f"no pixel of {images} images has a label, so nothing can be evaluated; "
                f"`hires data check` lists such label maps (data.ignore)"
            )
    elif kind == IMAGES:
        total *= math.prod(shape[1:])
    made["loss"] = finite(fsum(columns["loss"]) / total)
    metrics = metrics_of(kind, shape)
    for name in filter(columns.__contains__, metrics):
        made[name] = finite(fsum(columns[name]) / images)
    if kind == IMAGES:
        broken = map(math.isnan, columns["psnr"])
        return made | {"not_finite": sum(broken)}
    if kind in ROW_KINDS:
        return made | _of_rows(Evaluated(kind, total, columns, ()), names, metrics)
    made["not_finite"] = sum(count for (_, predicted), count in counts.items() if predicted < 0)
    made["classes"] = by_class(counts, names, overlaps=kind == PIXELS)
    present = [one for one in made["classes"] if one["count"]]
    evaluated = Evaluated(kind, total, columns, present)
    for name, metric in metrics.items():
        if issubclass(metric, CountsMetric):
            made[name] = metric.value(evaluated)
    if kind == CLASSES:
        made["top1_ci95"] = wilson(sum(place == 0 for place in columns["place"]), total)
    if len(names) <= MOST_LISTED:
        size = range(len(names))
        made["confusion"] = [[counts.get((t, p), 0) for p in size] for t in size]
    return made


def _of_rows(
    evaluated: Evaluated, names: Sequence[str], metrics: Mapping[str, type[EvaluationMetric]]
) -> dict[str, Any]:
    """Returns the summary of labels or numbers, ``names`` of which an output has."""
    outputs = [output for _, output in evaluated.rows()]
    broken = [not all(map(math.isfinite, row)) for row in zip(*outputs, strict=True)]
    made: dict[str, Any] = {"not_finite": sum(broken)}
    for name, metric in metrics.items():
        assert issubclass(metric, CountsMetric)
        made[name] = finite(metric.value(evaluated))
    if evaluated.kind == NUMBERS:
        return made
    made["subset_accuracy_ci95"] = wilson(int(sum(evaluated.columns["exact"])), evaluated.total)
    made["classes"] = []
    for index, (name, pair) in enumerate(zip(names, evaluated.rows(), strict=True)):
        hits, actual, chosen = label_counts(*pair)
        row = {"class": index, "name": name, "count": actual, "precision": _share(hits, chosen)}
        row |= {"recall": _share(hits, actual), "f1": _share(2 * hits, actual + chosen)}
        made["classes"].append(row)
    return made


def by_class(counts: Counts, names: Sequence[str], overlaps: bool) -> list[dict[str, Any]]:
    """Returns count, precision, recall and, of ``overlaps``, IoU and Dice of every class.

    None: 0 of 0.
    """
    actual: collections.Counter[int] = collections.Counter()
    predicted: collections.Counter[int] = collections.Counter()
    for (of, made), number in counts.items():
        actual[of] += number
        predicted[made] += number
    rows = []
    for index, name in enumerate(names):
        hits, either = counts.get((index, index), 0), actual[index] + predicted[index]
        row = {"class": index, "name": name, "count": actual[index]}
        row |= {"precision": _share(hits, predicted[index]), "recall": _share(hits, actual[index])}
        if overlaps:
            row |= {"iou": _share(hits, either - hits), "dice": _share(2 * hits, either)}
        rows.append(row)
    return rows


def wilson(hits: int, total: int) -> list[float] | None:
    """Returns the 95 % interval of a share, [low, high]; None of nothing.

    Source:
        Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    if not total:
        return None
    share, z2 = hits / total, Z95**2 / total
    middle = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    return [max(0.0, middle - half), min(1.0, middle + half)]


def paired_difference(gained: int, lost: int, total: int) -> tuple[float, float] | None:
    """Returns the 95 % interval of the difference of two shares of the same units; None of nothing.

    ``gained`` units count in the first share only, ``lost`` ones in the second only. Units on which
    both agree add nothing but their number, so it is narrower than that of either share.

    Source:
        Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial
        proportions based on paired data", Journal of Educational and Behavioral Statistics, 2012.
    """
    if not total:
        return None
    more, less = (gained + 1) / (total + 2), (lost + 1) / (total + 2)
    half = Z95 * math.sqrt((more + less - (more - less) ** 2) / (total + 2))
    return max(-1.0, more - less - half), min(1.0, more - less + half)


def finite(value: float) -> float | None:
    """Returns a number that JSON can hold; None of NaN and infinity."""
    return value if math.isfinite(value) else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


if TYPE_CHECKING:
    from torch import Tensor
