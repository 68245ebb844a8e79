"""Computes 95 % intervals of accuracies whose independent units are images, by a bootstrap.

    images           0  1  2  3  4
    drawn at first   4  0  0  2  1      counted again by the same formula
    then             1  1  3  0  4      and again; the results spread as data sets do

Pixels of one image resemble each other, so a share of all pixels has no Wilson interval.

Draws of few images spread less than they should: each is widened by sqrt(n / (n - 1)) and by the
chi-square uncertainty of a spread estimated from n, so that the interval of a mean is Student's t.
All counts are sums of integers and the draws begin at a fixed number, so every layout has the same
interval where its counts are the same.

Source:
    Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13; the widening as in
    Hesterberg, "What teachers should know about the bootstrap", 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 2000
TAIL = 0.025
_SEED = 95
_AT_ONCE = 2**20  # images of several resamples that are drawn together

Interval = list[float] | None


def mean_interval(values: Sequence[float]) -> Interval:
    """Returns the interval of a mean over images; None of one image, or if a value is infinite."""
    column = np.array(values, dtype=np.float64)[:, None]
    if not np.isfinite(column).all():
        return None
    [interval] = intervals(column, lambda sums: sums / len(values))
    return interval


def overlap_intervals(
    counts: Mapping[tuple[int, int, int], int], num_images: int, num_classes: int
) -> dict[str, Interval]:
    """Returns those of the share of right pixels and of the means of IoU and Dice over classes.

    ``counts`` are pixels by (image, class, predicted class, or -1).
    """
    table = np.zeros((num_images, 3, num_classes))  # right ones, actual, predicted
    for (image, actual, predicted), number in counts.items():
        table[image, 0, actual] += number * (actual == predicted)
        table[image, 1, actual] += number
        table[image, 2, predicted] += number * (predicted >= 0)
    table = table[table[:, 1].any(1)]  # draws of images without labels would be shares of nothing

    def shares(sums: Floats) -> Floats:
        right, actual, predicted = sums.reshape(-1, 3, num_classes).transpose(1, 0, 2)
        present = actual > 0
        either = np.maximum(actual + predicted, 1)
        parts = right / np.maximum(either - right, 1), 2 * right / either
        means = [(part * present).sum(1) / present.sum(1) for part in parts]
        return np.stack([right.sum(1) / actual.sum(1), *means], axis=1)

    found = intervals(table.reshape(len(table), -1), shares, (0.0, 1.0))
    return dict(zip(("top1_ci95", "mean_iou_ci95", "mean_dice_ci95"), found, strict=True))


def number_intervals(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> dict[str, Interval]:
    """Returns those of MAE, RMSE and R2, means over some numbers of each image.

    ``pairs`` are targets and outputs of all images, of each of the numbers.
    """
    ends = {"mae_ci95": (0.0, np.inf), "rmse_ci95": (0.0, np.inf), "r2_ci95": (-np.inf, 1.0)}
    target, output = (np.array(some, np.float64) for some in zip(*pairs, strict=True))
    error, off = target - output, target - target.mean(1, keepdims=True)  # sums stay small
    table = np.stack([abs(error), error**2, off, off**2])  # (4, numbers, images)
    if not np.isfinite(table).all():
        return dict.fromkeys(ends)
    n = target.shape[1]

    def statistics(sums: Floats) -> Floats:
        size, square, first, second = sums.reshape(-1, 4, len(pairs)).transpose(1, 0, 2)
        spread = second - first**2 / n
        flat = spread <= 1e-12 * second  # all of a draw have one target
        r2 = np.where(flat, square == 0, 1 - square / np.where(flat, 1, spread))
        return np.stack([one.mean(1) for one in (size / n, np.sqrt(square / n), r2)], axis=1)

    found = intervals(table.reshape(-1, n).T, statistics, zip(*ends.values(), strict=True))
    return dict(zip(ends, found, strict=True))


def intervals(
    columns: Floats,
    statistics: Callable[[Floats], Floats],
    bounds: Iterable[Any] = (-np.inf, np.inf),
) -> list[Interval]:
    """Returns the intervals of some numbers that follow from sums over images.

    ``columns`` are what is added, (images, sums); ``statistics`` take (resamples, sums) and return
    (resamples, numbers), within ``bounds`` of all or of each. None of one image: its spread is
    unknown.
    """
    n = len(columns)
    [own] = statistics(columns.sum(0, keepdims=True))
    if n < 2:
        return [None] * len(own)
    rng, sums = np.random.default_rng(_SEED), []
    for first in range(0, RESAMPLES, step := max(1, _AT_ONCE // n)):
        rows = min(step, RESAMPLES - first)
        places = rng.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
        times = np.bincount(places.ravel(), minlength=rows * n).reshape(rows, n)
        sums.append(times.astype(np.float64) @ columns)
    off = statistics(np.concatenate(sums)) - own
    off *= np.sqrt(n / rng.chisquare(n - 1, size=(RESAMPLES, 1)))  # both of the widenings
    ends = np.clip(own + np.quantile(off, (TAIL, 1 - TAIL), axis=0), *bounds)
    return [[float(low), float(high)] for low, high in ends.T]
