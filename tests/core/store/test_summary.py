"""The numbers of a record."""

from __future__ import annotations

from hires.core.store.summary import confidence, quantile


def test_confidence_interval_needs_six_values():
    # Two sides of 2^-5 each are 6 %, more than the 5 % that a 95 % interval may miss.
    assert confidence([1, 2, 3, 4, 5]) is None
    assert confidence([1, 2, 3, 4, 5, 6]) == [1, 6]


def test_confidence_interval_leaves_out_the_extremes_of_many_values():
    # The textbook's table for n=20: the 6th and the 15th value.
    assert confidence(list(range(1, 21))) == [6, 15]


def test_quantile_interpolates():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5


def test_confidence_interval_of_very_many_values():
    # 2^-n and the binomials are no doubles from 1,030 values on: a long run lost its record.
    low, high = confidence(list(range(100_000)))
    # The normal approximation: 1.96 * sqrt(n) / 2 on each side of the middle.
    assert abs(50_000 - 310 - low) < 3
    assert abs(50_000 + 310 - high) < 3
