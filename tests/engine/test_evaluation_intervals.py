"""Are intervals over images as wide as what images differ by says, and the same every time?"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from hires.engine.evaluation_intervals import (
    RESAMPLES,
    intervals,
    mean_interval,
    overlap_intervals,
)

T_975 = {5: 2.776, 30: 2.045}
"""Student's t of n - 1 degrees of freedom, from a table."""


@pytest.mark.parametrize("n", T_975)
def test_interval_of_a_mean_is_students(n):
    values = np.random.default_rng(n).normal(30.0, 2.0, n)
    low, high = mean_interval(values.tolist())
    half = T_975[n] * values.std(ddof=1) / math.sqrt(n)
    # 2000 draws place an end within 5 % of the half, and few units are no normal distribution.
    assert low == pytest.approx(values.mean() - half, abs=0.2 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.2 * half)


def test_95_of_100_intervals_hold_what_images_are_drawn_from():
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        low, high = mean_interval(rng.exponential(1.0, 40).tolist())
        held += low <= 1 <= high
    assert 175 <= held <= 199  # of a skew distribution and 40 images: about 93 %


def images_of(num_images, seed=0, spread=1.0):
    """Pixels by (image, class, predicted class): each image has an accuracy of its own."""
    rng, counts = np.random.default_rng(seed), Counter()
    for image in range(num_images):
        right = rng.beta(8 / spread, 2 / spread)
        for label in (0, 1):
            hits = int(rng.binomial(500, right))
            counts[image, label, label] += hits
            counts[image, label, 1 - label] += 500 - hits
    return counts


def plain(counts, images):
    """Share of right pixels, mean IoU and mean Dice of some images, by hand."""
    total = Counter()
    for image in images:
        for (of, label, made), number in counts.items():
            total[label, made] += number * (of == image)
    right = sum(number for (label, made), number in total.items() if label == made)
    ious, dices = [], []
    for label in {label for label, _ in +total}:
        hits = total[label, label]
        either = sum(n * ((t == label) + (p == label)) for (t, p), n in total.items())
        ious.append(hits / (either - hits))
        dices.append(2 * hits / either)
    means = (sum(shares) / len(shares) for shares in (ious, dices))
    return [right / sum(total.values()), *means]


def test_draws_are_counted_by_the_formula_of_the_whole():
    counts = {**images_of(6), (6, 2, 2): 70, (6, 2, 0): 30}  # a class of one image
    found = overlap_intervals(counts, 7, 3)
    # The same draws, image by image.
    rng, values = np.random.default_rng(95), []
    for row in rng.integers(7, size=(RESAMPLES, 7))[:60]:
        values.append(plain(counts, row.tolist()))
    own, drawn = plain(counts, range(7)), []

    def spy(sums):
        right, actual, _ = sums.reshape(-1, 3, 3).transpose(1, 0, 2)
        drawn.append(right.sum(1) / actual.sum(1))
        return drawn[-1][:, None]

    table = np.zeros((7, 3, 3))
    for (image, label, made), number in counts.items():
        table[image, 0, label] += number * (label == made)
        table[image, 1, label] += number
        table[image, 2, made] += number
    intervals(table.reshape(7, -1), spy)
    assert drawn[1][:60].tolist() == pytest.approx([value[0] for value in values], rel=1e-12)
    for name, value in zip(("top1_ci95", "mean_iou_ci95", "mean_dice_ci95"), own, strict=True):
        low, high = found[name]
        assert 0 <= low < value < high <= 1, name


def test_images_are_the_units_and_not_their_pixels():
    found = overlap_intervals(images_of(20), 20, 2)["top1_ci95"]
    more = {key: 100 * number for key, number in images_of(20).items()}
    assert overlap_intervals(more, 20, 2)["top1_ci95"] == pytest.approx(found, rel=1e-12)
    many = overlap_intervals(images_of(320), 320, 2)["top1_ci95"]
    assert 2.5 < (found[1] - found[0]) / (many[1] - many[0]) < 6  # a quarter, of 16 times as many


def test_order_of_counts_changes_no_bit():
    counts = images_of(9)
    again = dict(reversed(counts.items()))
    assert overlap_intervals(counts, 9, 2) == overlap_intervals(again, 9, 2)


def test_equal_images_have_an_interval_of_one_number_and_one_image_has_none():
    same = {(image, 0, made): 10 for image in range(5) for made in (0, 1)}
    assert overlap_intervals(same, 5, 2)["top1_ci95"] == [0.5, 0.5]
    assert set(overlap_intervals({(0, 0, 0): 3}, 1, 2).values()) == {None}
    assert mean_interval([31.0]) is None
    assert mean_interval([31.0, math.inf]) is None


def test_memory_of_draws_is_bounded(monkeypatch):
    whole = mean_interval([float(i % 7) for i in range(50)])
    # All in one piece or row after row: the same draws.
    monkeypatch.setattr("hires.engine.evaluation_intervals._AT_ONCE", 64)
    assert mean_interval([float(i % 7) for i in range(50)]) == pytest.approx(whole, rel=1e-12)
