"""Does the interval hold what it promises, and find what is there?"""

from __future__ import annotations

import math

import numpy as np
import pytest

from hires.report.compare.bootstrap import block_length, compare, together
from hires.report.read.repeats import Repeat, median, middle

SEEDS = 100


def series(rng, count, noise=0.05, memory=0.0):
    """Step times with noise of which a share passes on from step to step."""
    found = [rng.normal() * noise]
    for _ in range(count - 1):
        fresh = rng.normal() * noise * math.sqrt(1 - memory**2)
        found.append(memory * found[-1] + fresh)
    return np.exp(found)


def repeats(rng, count, shift=1.0, noise=0.02):
    return [Repeat("0", [shift * math.exp(noise * rng.normal())]) for _ in range(count)]


def share_with_one(make):
    """Returns in how many of 100 seeds the interval holds 1."""
    held = 0
    for seed in range(SEEDS):
        a, b = make(np.random.default_rng([5, seed]))
        low, high = compare(a, b, np.random.default_rng(seed), 500).interval()
        held += low <= 1 <= high
    return held


def test_equal_repeats_are_equal_in_95_of_100_seeds():
    assert share_with_one(lambda rng: (repeats(rng, 5), repeats(rng, 5))) >= 92
    assert share_with_one(lambda rng: (repeats(rng, 2), repeats(rng, 3))) >= 92


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_equal_runs_are_equal_though_neighbouring_steps_are_alike(memory):
    def make(rng):
        return [[Repeat("0", series(rng, 40, memory=memory))] for _ in range(2)]

    # 100 seeds of a share of 95 % spread by 2.2: 90 is what chance leaves it.
    assert share_with_one(make) >= 90


def test_steps_drawn_one_by_one_would_promise_too_much():
    rng = np.random.default_rng(0)
    assert block_length(series(rng, 500)) <= 3
    assert block_length(series(rng, 500, memory=0.9)) > 20
    assert block_length(np.ones(50)) == 1
    assert block_length(np.array([1.0, 2.0])) == 1


@pytest.mark.parametrize("shift", [0.9, 1.1])
def test_shift_of_a_tenth_is_found_in_repeats(shift):
    rng = np.random.default_rng(3)
    found = compare(repeats(rng, 4), repeats(rng, 4, shift), rng)
    low, high = found.interval()
    assert low < shift < high
    assert not low <= 1 <= high
    assert found.unit == "4 and 4 repeats"


def test_shift_of_a_tenth_is_found_in_one_run_each():
    rng = np.random.default_rng(3)
    a, b = [Repeat("0", series(rng, 60))], [Repeat("0", 1.1 * series(rng, 60))]
    low, _ = compare(a, b, rng).interval()
    assert low > 1
    assert compare(a, b, rng).unit.startswith("blocks of ")


def test_noise_that_seeds_share_is_taken_out_by_pairing():
    rng = np.random.default_rng(1)
    common = np.exp(rng.normal(size=5))
    a = [Repeat(str(n), [value]) for n, value in enumerate(common)]
    b = [Repeat(str(n), [1.1 * v * math.exp(0.01 * rng.normal())]) for n, v in enumerate(common)]
    found = compare(a, b, rng)
    low, high = found.interval()
    assert found.unit == "5 pairs of seeds"
    assert 1 < low < 1.1 < high < 1.15
    low, high = compare(a, [Repeat("x", r.values) for r in b], rng).interval()
    assert low < 1 < high


def test_runs_of_one_side_are_not_enough_for_repeats():
    rng = np.random.default_rng(1)
    a = [Repeat("0", series(rng, 30)) for _ in range(3)]
    assert compare(a, [Repeat("0", series(rng, 30))], rng).unit.startswith("blocks of ")


def test_one_number_each_has_a_ratio_and_no_interval():
    found = compare([Repeat("0", [2.0])], [Repeat("0", [3.0])], np.random.default_rng(0))
    assert found.ratio == pytest.approx(1.5)
    assert found.interval() is None


def test_same_numbers_have_an_interval_without_width():
    same = [Repeat("0", [2.0])] * 3
    low, high = compare(same, same, np.random.default_rng(0)).interval()
    assert low == high == 1


def test_few_units_have_a_wider_interval_than_many():
    def width(count):
        rng = np.random.default_rng(2)
        low, high = compare(1.0, repeats(rng, count), rng).interval()
        return high / low

    assert width(2) > width(4) > width(16)


def test_same_draws_every_time():
    rng = np.random.default_rng(4)
    a, b = [Repeat("0", series(rng, 30))], [Repeat("0", series(rng, 30))]
    ends = [compare(a, b, np.random.default_rng(9)).interval() for _ in range(2)]
    assert ends[0] == ends[1]
    assert compare(a, b, np.random.default_rng(8)).interval() != ends[0]


def test_very_long_runs_are_taken_in_groups():
    rng = np.random.default_rng(5)
    a, b = [Repeat("0", rng.uniform(1, 2, 50_000))], [Repeat("0", rng.uniform(1, 2, 50_000))]
    low, high = compare(a, b, rng).interval()
    assert low < 1 < high < 1.05


def test_points_together_are_surer_than_one():
    rng = np.random.default_rng(6)
    each = [compare(repeats(rng, 4), repeats(rng, 4, 1.03), rng) for _ in range(30)]
    low, high = together(each).interval()
    assert 1 < low < 1.03 < high < 1.06


def test_ratios_beyond_all_bounds_stay_numbers():
    rng = np.random.default_rng(0)
    tiny, huge = [Repeat("0", [1e-300])] * 2, [Repeat("0", [1e300]), Repeat("0", [1e-300])]
    found = compare(tiny, huge, rng)
    assert all(map(math.isfinite, (found.ratio, *found.interval())))
    assert math.isfinite(compare(tiny[:1], huge[:1], rng).ratio)


def test_run_counts_as_the_median_over_its_attempts_and_a_point_as_the_mean_of_its_runs():
    one = [Repeat("0", [value, value, 99.0]) for value in (5.0, 25.0, 20.0)]
    two = [Repeat("1", [80.0])]
    assert median(one) == middle(one) == 20
    assert middle([*one, *two]) == pytest.approx(40)
    assert middle([]) is None
    rng = np.random.default_rng(0)
    assert compare(1.0, [*one, *two], rng).ratio == pytest.approx(40)
    assert compare(two, one, rng).ratio == pytest.approx(0.25)


def test_repeats_that_would_help_are_about_enough():
    """With that many the interval is not much wider than was asked for."""

    def typical(count, width):
        found = []
        for seed in range(40):
            rng = np.random.default_rng([8, seed])
            a, b = (
                [Repeat("0", [math.exp(0.1 * rng.normal())]) for _ in range(count)] for _ in "ab"
            )
            estimate = compare(a, b, rng, 500)
            low, high = estimate.interval()
            found.append((math.log(high / low), estimate.repeats_for(width)))
        return np.median(found, axis=0)

    wide, wanted = typical(4, 0.2)
    narrow, _ = typical(int(wanted), 0.2)
    assert narrow < wide
    assert 0.1 < narrow < 0.25
