"""How sure is a ratio? A bootstrap that draws what is independent, and no more than that.

Steps of one run are not independent: they share the machine's mood, and neighbours share more. So
what is drawn is, in this order: seeds that both sides have, each as a pair; repeats, if both sides
have several; else blocks of consecutive steps, long enough for what one step says of the next.

All is done with logarithms, whose difference is the ratio's. Few units spread less in a bootstrap
than they should; each draw is widened by sqrt(n / (n - 1)) and by the chi-square uncertainty of a
spread that n units tell of, so that a normal bootstrap distribution becomes Student's t.

Sources: circular blocks of Politis and Romano (1992), their length after Carlstein (1986); the
correction for few units after Hesterberg, "What teachers should know about the bootstrap" (2015).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hires.report.compare.repeated_points import Repeat, by_seed, centre, of_run, shared_seeds

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
_MOST_STEPS = 1024
"""A longer run is taken in groups of consecutive steps, each by its median."""
_LEAST_BLOCKS = 4
"""Blocks are at most as long as leaves so many, where there are so many steps."""

_LARGEST = math.floor(math.log(sys.float_info.max))
_NORMAL = 1.96
"""Standard deviations on either side that hold 95 % of a normal distribution."""
_LEAST_REPEATS = 3
_MOST_REPEATS = 1e3
"""Largest factor by which an interval is said to be too wide."""
_NOTHING = "one number each: no interval"


@dataclass(frozen=True)
class Estimate:
    """A ratio and how sure it is."""

    log_ratio: float
    draws: Floats | None
    """What the logarithm may be off by, once for each resample; None: nothing tells."""
    unit: str
    """What was drawn, in words."""
    repeats: int = 1
    """Of the side that has fewer."""
    spread: float = 0.0
    """Standard deviation of the logarithm that the draws showed, before they were widened."""

    @property
    def ratio(self) -> float:
        """B over A."""
        return _exp(self.log_ratio)

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Returns the ends between which the ratio lies with this confidence; None if unknown."""
        if self.draws is None:
            return None
        tail = (1 - confidence) / 2
        low, high = np.quantile(self.draws, (tail, 1 - tail))
        return _exp(self.log_ratio + float(low)), _exp(self.log_ratio + float(high))

    def repeats_for(self, width: float) -> int:
        """Returns about how many repeats would make the 95 % interval of the logarithm so wide.

        The width falls with the square root of their number; of few, Student's t asks for about
        two more, and without three nobody knows how far they differ.
        """
        wanted = self.repeats * min(2 * _NORMAL * self.spread / width, _MOST_REPEATS) ** 2
        return max(_LEAST_REPEATS, math.ceil(wanted) + 2)


def compare(
    a: Sequence[Repeat], b: Sequence[Repeat], rng: np.random.Generator, resamples: int = RESAMPLES
) -> Estimate:
    """Returns by which factor B differs from A.

    Args:
        a: repeats of what was.
        b: repeats of what is.
        rng: draws.
        resamples: how many draws.
    """
    if len(shared_seeds(a, b)) > 1:
        pairs = _differences(a, b)
        drawn = [_of_units(pairs, rng, resamples)]
        return _estimate(
            float(np.mean(pairs)), drawn, rng, f"{len(pairs)} pairs of seeds", len(pairs)
        )
    ratio = centre(b) - centre(a)
    if len(a) > 1 and len(b) > 1:
        drawn = [_of_repeats(side, rng, resamples) for side in (b, a)]
        fewer = min(len(a), len(b))
        return _estimate(ratio, drawn, rng, f"{len(a)} and {len(b)} repeats", fewer)
    return _by_blocks(ratio, [b, a], rng, resamples)


def beside(
    value: float, b: Sequence[Repeat], rng: np.random.Generator, resamples: int = RESAMPLES
) -> Estimate:
    """Returns by which factor B differs from a number that is taken as exact."""
    ratio = centre(b) - math.log(value)
    if len(b) > 1:
        drawn = [_of_repeats(b, rng, resamples)]
        return _estimate(ratio, drawn, rng, f"{len(b)} repeats", len(b))
    return _by_blocks(ratio, [b], rng, resamples)


def together(estimates: Sequence[Estimate]) -> Estimate:
    """Returns the geometric mean of the ratios of several points."""
    ratio = float(np.mean([estimate.log_ratio for estimate in estimates]))
    known = [estimate.draws for estimate in estimates if estimate.draws is not None]
    if not known:
        return Estimate(ratio, None, _NOTHING)
    drawn = np.sum(known, axis=0) / len(estimates)
    spread = math.hypot(*(estimate.spread for estimate in estimates)) / len(estimates)
    fewest = min(estimate.repeats for estimate in estimates)
    return Estimate(ratio, drawn, f"all {len(estimates)} points together", fewest, spread)


def block_length(values: Floats) -> int:
    """Returns how many consecutive steps are drawn together.

    It grows with the cube root of the number of steps, and with what one step says of the next.
    """
    n = len(values)
    centred = values - values.mean()
    power = float(centred @ centred)
    rho = float(centred[1:] @ centred[:-1]) / power if power > 0 else 0.0
    rho += (1 + 3 * max(rho, 0.0)) / n  # the estimate is too low for short series, by about this
    rho = min(max(rho, 0.0), 0.95)
    wanted = math.pow(math.sqrt(6) * rho / (1 - rho**2), 2 / 3) * math.pow(n, 1 / 3)
    return max(1, min(math.ceil(wanted), n // _LEAST_BLOCKS))


@dataclass(frozen=True)
class _Drawn:
    """Draws of one side."""

    values: Floats
    """Deviations of a logarithm."""
    freedom: float
    """Degrees of freedom of their spread."""


def _by_blocks(
    ratio: float, sides: Sequence[Sequence[Repeat]], rng: np.random.Generator, resamples: int
) -> Estimate:
    """Returns an estimate by blocks of steps, if there are enough of them."""
    if any(len(repeat.values) < 2 for side in sides for repeat in side):
        return Estimate(ratio, None, _NOTHING)
    lengths: list[int] = []
    drawn = [_of_steps(side, rng, resamples, lengths) for side in sides]
    few, many = min(lengths), max(lengths)
    said = f"{few}" if few == many else f"{few} to {many}"
    steps = "step" if many == 1 else "steps"
    fewest = min(len(side) for side in sides)
    return _estimate(ratio, drawn, rng, f"blocks of {said} {steps}", fewest)


def _estimate(
    ratio: float, drawn: Sequence[_Drawn], rng: np.random.Generator, unit: str, repeats: int
) -> Estimate:
    """Returns an estimate from the draws of its sides."""
    spread = math.sqrt(sum(float(np.var(side.values)) for side in drawn))
    return Estimate(ratio, _widened(drawn, rng), unit, repeats, spread)


def _of_units(logs: Floats, rng: np.random.Generator, resamples: int) -> _Drawn:
    """Returns draws of the mean of independent numbers."""
    n = len(logs)
    means = logs[rng.integers(n, size=(resamples, n))].mean(axis=1)
    return _Drawn((means - logs.mean()) * math.sqrt(n / (n - 1)), n - 1)


def _of_repeats(side: Sequence[Repeat], rng: np.random.Generator, resamples: int) -> _Drawn:
    """Returns draws of a side: of its runs, or of the attempts if there is one run."""
    runs = by_seed(side)
    if len(runs) > 1:
        return _of_units(np.log([of_run(run) for run in runs]), rng, resamples)
    medians = np.array([np.median(repeat.values) for repeat in side])
    n = len(medians)
    drawn = np.median(medians[rng.integers(n, size=(resamples, n))], axis=1)
    off = np.log(drawn) - math.log(float(np.median(medians)))
    return _Drawn(off * math.sqrt(n / (n - 1)), n - 1)


def _of_steps(
    side: Sequence[Repeat], rng: np.random.Generator, resamples: int, lengths: list[int]
) -> _Drawn:
    """Returns draws of a side whose steps are drawn; the lengths of blocks are added."""
    freedom, runs = 0.0, []
    for run in by_seed(side):
        medians = []
        for repeat in run:
            values = _grouped(np.asarray(repeat.values, dtype=np.float64))
            n, length = len(values), block_length(values)
            lengths.append(length * max(1, len(repeat.values) // n))
            freedom += max(n / length, 2.0) - 1
            medians.append(_medians(values, length, rng, resamples))
        runs.append(np.log(np.median(medians, axis=0)))
    drawn = np.mean(runs, axis=0)
    return _Drawn(drawn - centre(side), freedom)


def _medians(values: Floats, length: int, rng: np.random.Generator, resamples: int) -> Floats:
    """Returns medians of steps that were drawn in blocks, spread as few blocks ask."""
    n = len(values)
    starts = rng.integers(n, size=(resamples, math.ceil(n / length), 1))
    places = (starts + np.arange(length)).reshape(resamples, -1)[:, :n] % n
    blocks = max(n / length, 2.0)
    middle = math.log(np.median(values))
    off = np.log(np.median(values[places], axis=1)) - middle
    return np.asarray(np.exp(middle + off * math.sqrt(blocks / (blocks - 1))))


def _widened(drawn: Sequence[_Drawn], rng: np.random.Generator) -> Floats:
    """Returns the draws of the first side minus those of the second, as wide as few units ask."""
    total = drawn[0].values - drawn[1].values if len(drawn) > 1 else drawn[0].values
    spreads = [float(np.var(side.values)) for side in drawn]
    freedom = sum(side.freedom for side in drawn)
    if sum(spreads) > 0:  # of two samples of different spread, after Welch
        weighed = [s**2 / side.freedom for s, side in zip(spreads, drawn, strict=True)]
        freedom = sum(spreads) ** 2 / sum(weighed)
    widths: Floats = np.sqrt(freedom / rng.chisquare(freedom, len(total)))
    return np.asarray(total * widths)


def _differences(a: Sequence[Repeat], b: Sequence[Repeat]) -> Floats:
    """Returns the differences of the seeds that both sides have."""
    sides = [{runs[0].seed: centre(runs) for runs in by_seed(side)} for side in (a, b)]
    return np.array([sides[1][seed] - sides[0][seed] for seed in shared_seeds(a, b)])


def _exp(logarithm: float) -> float:
    """Returns a ratio; what is no double any more is the largest or smallest one, nearly."""
    return math.exp(min(max(logarithm, -_LARGEST), _LARGEST))


def _grouped(values: Floats) -> Floats:
    """Returns a long series as medians of consecutive steps."""
    if len(values) <= _MOST_STEPS:
        return values
    groups = np.array_split(values, _MOST_STEPS)
    return np.array([np.median(group) for group in groups])
