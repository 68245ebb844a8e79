"""The interval of a ratio holds what it promises, and finds a difference that is there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hires.report.compare.bootstrap import (
    Estimate,
    Repeat,
    block_length,
    center,
    compare,
    geometric_mean,
    median,
)


def series(rng, count, noise=0.05, memory=0.0):
    """Step times with noise of which a share passes on from step to step."""
    values = [rng.normal() * noise]
    for _ in range(count - 1):
        values.append(memory * values[-1] + rng.normal() * noise * math.sqrt(1 - memory**2))
    return np.exp(values)


def repeats(rng, count, shift=1.0, noise=0.02):
    return [Repeat("0", [shift * math.exp(noise * rng.normal())]) for _ in range(count)]


# 100 seeds of a share of 95 % spread by 2.2: 90 is what chance leaves it.
@pytest.mark.parametrize(
    ("make", "least"),
    [
        (lambda rng: (repeats(rng, 2), repeats(rng, 3)), 92),
        (lambda rng: [[Repeat("0", series(rng, 40, memory=0.5))] for _ in "ab"], 90),
    ],
    ids=["repeats", "steps"],
)
def test_equal_sides_are_equal_in_95_of_100_seeds(make, least):
    held = 0
    for seed in range(100):
        a, b = make(np.random.default_rng([5, seed]))
        low, high = compare(a, b, np.random.default_rng(seed), 500).interval()
        held += low <= 1 <= high
    assert least <= held < 100


def test_shift_of_a_tenth_is_found():
    for shift in (0.9, 1.1):
        rng = np.random.default_rng(3)
        estimate = compare(repeats(rng, 4), repeats(rng, 4, shift), rng)
        low, high = estimate.interval()
        assert low < shift < high
        assert not low <= 1 <= high
        assert estimate.unit == "4 and 4 repeats"
    a, b = [Repeat("0", series(rng, 60))], [Repeat("0", 1.1 * series(rng, 60))]
    estimate = compare(a, b, rng)
    assert estimate.interval()[0] > 1
    assert estimate.unit.startswith("blocks of ")
    points = [compare(repeats(rng, 4), repeats(rng, 4, 1.03), rng) for _ in range(30)]
    low, high = geometric_mean(points).interval()  # together they are surer than one
    assert 1 < low < 1.03 < high < 1.06


def test_steps_that_depend_on_each_other_are_drawn_in_blocks():
    rng = np.random.default_rng(0)
    assert block_length(series(rng, 500)) <= 3
    assert block_length(series(rng, 500, memory=0.9)) > 20
    assert block_length(np.ones(50)) == block_length(np.array([1.0, 2.0])) == 1
    lengths = [
        block_length(series(np.random.default_rng(seed), 40, memory=0.7)) for seed in range(100)
    ]
    assert np.mean(lengths) == pytest.approx(7.7, abs=0.5)  # Carlstein's of this memory
    long = [[Repeat("0", rng.uniform(1, 2, 50_000))] for _ in "ab"]  # they are taken in groups
    low, high = compare(*long, rng, 500).interval()
    assert low < 1 < high < 1.05


def test_noise_that_seeds_share_is_taken_out_by_pairing():
    rng = np.random.default_rng(1)
    common = np.exp(rng.normal(size=5))
    a = [Repeat(str(n), [value]) for n, value in enumerate(common)]
    b = [Repeat(str(n), [1.1 * v * math.exp(0.01 * rng.normal())]) for n, v in enumerate(common)]
    estimate = compare(a, b, rng)
    low, high = estimate.interval()
    assert estimate.unit == "5 pairs of seeds"
    assert 1 < low < 1.1 < high < 1.15
    low, high = compare(a, [Repeat("x", r.values) for r in b], rng).interval()
    assert low < 1 < high


def test_few_numbers_have_a_wide_interval_or_none_and_draws_repeat():
    def ends(count, seed=2):
        rng = np.random.default_rng(seed)
        return compare(1.0, repeats(np.random.default_rng(2), count), rng).interval()

    assert ends(2)[1] / ends(2)[0] > ends(16)[1] / ends(16)[0]
    assert ends(4) == ends(4) != ends(4, seed=3)
    rng = np.random.default_rng(4)
    one = compare([Repeat("0", [2.0])], [Repeat("0", [3.0])], rng)
    assert (one.ratio, one.interval()) == (pytest.approx(1.5), None)
    log_ends = np.log(Estimate(0.0, np.linspace(-1, 1, 2001), "any").interval())
    assert log_ends == pytest.approx([-0.95, 0.95])
    tiny, huge = [Repeat("0", [1e-300])] * 2, [Repeat("0", [1e300]), Repeat("0", [1e-300])]
    estimate = compare(tiny, huge, rng)
    assert all(map(math.isfinite, (estimate.ratio, *estimate.interval())))


def test_run_counts_as_the_median_over_its_attempts_and_a_point_as_the_mean_of_its_runs():
    one = [Repeat("0", [value, value, 99.0]) for value in (5.0, 25.0, 20.0)]
    two = [Repeat("1", [80.0])]
    assert median(one) == center(one) == 20
    assert center([*one, *two]) == pytest.approx(40)
    assert center([]) is None
    assert compare(two, one, np.random.default_rng(0)).ratio == pytest.approx(0.25)


def test_point_without_an_interval_halves_that_of_two_together():
    one = Estimate(0.0, np.array([-0.2, -0.1, 0.1, 0.2]), "repeats")
    (low, high), (narrow, upper) = (
        one.interval(),
        geometric_mean([one, Estimate(0.0, None, "")]).interval(),
    )
    assert math.log(upper / narrow) == pytest.approx(math.log(high / low) / 2)
