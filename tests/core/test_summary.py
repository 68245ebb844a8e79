"""The numbers of a record."""

from __future__ import annotations

from hires.core.summary import confidence, quantile


def test_confidence_interval_needs_six_values():
    # Two sides of 2^-5 each are 6 %, more than the 5 % that a 95 % interval may miss.
    assert confidence([1, 2, 3, 4, 5]) is None
    assert confidence([1, 2, 3, 4, 5, 6]) == [1, 6]


def test_confidence_interval_leaves_out_the_extremes_of_many_values():
    # The textbook's table for n=20: the 6th and the 15th value.
    assert confidence(list(range(1, 21))) == [6, 15]


def test_quantile_interpolates():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
