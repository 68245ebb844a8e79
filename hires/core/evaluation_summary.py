"""Computes accuracies from what the ranks counted in one pass over a data set.

    rank, step     rows of the samples that it saw, counts of (class, predicted class)
    all of them -> by sample, in the order of the data set -> one summary

Counts are integers, and sums of fractions are exact (``math.fsum``), so no order of ranks, tiles or
microbatches changes a digit. No torch: rank 0 and readers of results share it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hires.core.errors import RunError

CLASSES, PIXELS, IMAGES = "classes", "pixels", "images"
"""What one output holds: a class for each image, one for each pixel, or an image."""
ROWS = {
    CLASSES: ("label", "predicted", "place", "loss", "score"),
    PIXELS: ("pixels", "correct", "loss"),
    IMAGES: ("squared_error", "loss", "similarity"),
}
"""What a row holds behind the sample's number. ``place``: how many classes scored higher than the
label; tiles of one sample have a row each, which are added."""
TOP = 5
MOST_LISTED = 64
"""Classes up to which a confusion matrix is kept."""
Z95 = 1.959963984540054
"""Of the normal distribution: 95 % lie within so many standard deviations."""
PEAK = 4.0
"""From black (-2) to white (2)."""
SIMILARITY_WINDOW = 11
"""Rows and columns of a window of SSIM."""

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
    if sorted(parts) != list(range(num_samples)):
        missing = next(i for i in range(num_samples + 1) if i not in parts)
        raise RunError(f"no rank {done} sample {missing} of {num_samples}")
    if kind != CLASSES:
        return [_added(parts[sample]) for sample in range(num_samples)]
    for sample, held in parts.items():
        if len(held) > 1:
            raise RunError(f"sample {sample} was {done} {len(held)} times")
    return [[*parts[sample][0]] for sample in range(num_samples)]


def _added(rows: list[Numbers]) -> list[float]:
    return [sum(c) if isinstance(c[0], int) else fsum(c) for c in zip(*rows, strict=True)]


def summary(
    kind: str,
    samples: Sequence[Numbers],
    counts: Counts,
    names: Sequence[str],
    shape: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns the accuracies of a data set as plain values; fractions are from 0 to 1.

    ``samples`` are those of :func:`by_sample`, ``names`` those of all classes, and ``shape`` that
    of an output that is an image, (C, H, W).
    """
    columns = dict(zip(ROWS[kind], zip(*samples, strict=True), strict=True))
    made: dict[str, Any] = {"kind": kind, "images": len(samples)}
    if kind == IMAGES:
        numbers = math.prod(shape)
        ratios = signal_ratios(columns["squared_error"], numbers)
        loss = fsum(columns["loss"]) / (len(samples) * numbers)
        made["not_finite"] = sum(map(math.isnan, columns["squared_error"]))
        made |= {"loss": finite(loss), "psnr": finite(fsum(ratios) / len(samples)), "ssim": None}
        if shares := similarities(columns["similarity"], shape):
            made["ssim"] = finite(fsum(shares) / len(shares))
        return made
    if kind == CLASSES:
        total, places = len(samples), columns["place"]
        counts = collections.Counter(zip(columns["label"], columns["predicted"], strict=True))
        top1 = sum(place == 0 for place in places)
        made |= {"top1": top1 / total, "top1_ci95": wilson(top1, total), "top5": None}
        if len(names) > TOP:
            made["top5"] = sum(place < TOP for place in places) / total
    else:
        total, top1 = sum(columns["pixels"]), sum(columns["correct"])
        if not total:
            raise RunError(
                f"no pixel of {len(samples)} images has a label, so nothing can be evaluated; "
                f"`hires data check` lists such label maps (data.ignore)"
            )
        made |= {"pixels": total, "top1": top1 / total, "top5": None}
    made["not_finite"] = sum(count for (_, predicted), count in counts.items() if predicted < 0)
    made["loss"] = finite(fsum(columns["loss"]) / total)
    made["classes"] = by_class(counts, names, overlaps=kind == PIXELS)
    present = [one for one in made["classes"] if one["count"]]
    for what in ("recall", *(("iou", "dice") if kind == PIXELS else ())):
        made[f"mean_{what}"] = fsum([one[what] for one in present]) / len(present)
    if len(names) <= MOST_LISTED:
        size = range(len(names))
        made["confusion"] = [[counts.get((t, p), 0) for p in size] for t in size]
    return made


def signal_ratios(squared_errors: Iterable[float], numbers: int) -> list[float]:
    """Returns the PSNR of images of some numbers, in dB; infinite of one without error."""
    errors = (error / numbers for error in squared_errors)
    return [10 * math.log10(PEAK**2 / e) if e else math.inf for e in errors]


def similarities(sums: Iterable[float], shape: Sequence[int]) -> list[float]:
    """Returns the mean SSIM of images from their sums; none of images smaller than a window."""
    channels, *size = shape
    windows = channels * math.prod(max(0, length - SIMILARITY_WINDOW + 1) for length in size)
    return [one / windows for one in sums] if windows else []


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


def fsum(values: Iterable[float]) -> float:
    """Returns the exact sum, rounded once; NaN if a value is not finite."""
    held = list(values)
    return math.fsum(held) if all(map(math.isfinite, held)) else math.nan


def finite(value: float) -> float | None:
    """Returns a number that JSON can hold; None of NaN and infinity."""
    return value if math.isfinite(value) else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
