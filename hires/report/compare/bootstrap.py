"""Estimates a ratio and its confidence, by a bootstrap that resamples independent units only.

Steps of one run are not independent: they share the state of the machine, and neighbours share
more. The units are pairs of runs with a seed that both sides have; repeats, if both sides have
several; else blocks of consecutive steps, as long as their correlation needs.

Everything is computed on logarithms, whose difference is the ratio's. A bootstrap of few units
spreads less than it should; each draw is widened by sqrt(n / (n - 1)) and by the chi-square
uncertainty of a spread estimated from n units, so that a normal bootstrap distribution becomes
Student's t.

No library has this: scipy.stats.bootstrap draws single values, arch.bootstrap blocks of one series,
and neither seeds, repeats and steps inside each other; both bring scipy, which hires does without.

A side has the median over the attempts of each seed, and the geometric mean over the seeds: a ratio
of geometric means is the mean of the ratios of the pairs.

Sources: circular blocks of Politis and Romano (1992), their length after Carlstein (1986); the
correction for few units after Hesterberg, "What teachers should know about the bootstrap" (2015).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
_MAX_STEPS = 1024  # groups of consecutive steps, each by its median, that a longer run becomes
_MIN_BLOCKS = 4  # that a series is cut into at least, if it has so many steps

_LARGEST = math.floor(math.log(sys.float_info.max))


@dataclass(frozen=True)
class Repeat:
    """One complete attempt of a point."""

    seed: str
    values: Sequence[float]  # of every step that counts, or the one number of the attempt; above 0


@dataclass(frozen=True)
class Estimate:
    """A ratio and its uncertainty."""

    log_ratio: float
    draws: Floats | None
    """Deviations of the logarithm, one for each resample; None: its spread is unknown."""
    unit: str  # what was resampled, in words

    @property
    def ratio(self) -> float:
        """B over A."""
        return _exp(self.log_ratio)

    def interval(self) -> tuple[float, float] | None:
        """Returns the ends of the interval of ``CONFIDENCE`` around the ratio; None if unknown."""
        if self.draws is None:
            return None
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(self.draws, (tail, 1 - tail))
        return _exp(self.log_ratio + float(low)), _exp(self.log_ratio + float(high))


class _Draws(NamedTuple):
    values: Floats  # deviations of a logarithm
    degrees: float  # of freedom, of their spread
    lengths: Sequence[int] = ()  # of the blocks of steps that were drawn


def median(repeats: Sequence[Repeat]) -> float:
    """Returns the median over attempts of each one's median; NaN if a value is NaN."""
    with np.errstate(over="ignore"):
        return float(np.median([np.median(repeat.values) for repeat in repeats]))


def log_mean(repeats: Sequence[Repeat]) -> float:
    """Returns the mean over seeds of the logarithm of the median over the attempts of each."""
    return float(np.mean(np.log([median(run) for run in by_seed(repeats)])))


def center(repeats: Sequence[Repeat]) -> float | None:
    """Returns the number of a point, over its attempts or seeds; None unless all are usable."""
    values = [value for repeat in repeats for value in repeat.values]
    if not values or not usable(values):
        return None
    return median(repeats) if len(by_seed(repeats)) == 1 else math.exp(log_mean(repeats))


def usable(values: Sequence[float]) -> bool:
    """Whether numbers can be compared: finite, above 0, and so that their squares are finite."""
    return all(1e-100 < value < 1e100 for value in values)


def by_seed(repeats: Sequence[Repeat]) -> list[list[Repeat]]:
    """Returns the repeats of every seed."""
    runs: dict[str, list[Repeat]] = {}
    for repeat in repeats:
        runs.setdefault(repeat.seed, []).append(repeat)
    return list(runs.values())


def shared_seeds(a: Sequence[Repeat], b: Sequence[Repeat]) -> list[str]:
    """Returns the seeds that both sides have, in the order of A."""
    seeds = {repeat.seed for repeat in b}
    return [seed for seed in dict.fromkeys(repeat.seed for repeat in a) if seed in seeds]


def paired(
    a: Sequence[Repeat], b: Sequence[Repeat]
) -> tuple[list[Repeat], list[Repeat], list[str]]:
    """Returns the repeats by which two sides are compared, and the seeds that are left out.

    Several shared seeds are compared in pairs, without the others; else all repeats count.
    """
    every = list(dict.fromkeys(repeat.seed for repeat in [*a, *b]))
    shared = shared_seeds(a, b) if len(shared_seeds(a, b)) > 1 else every
    ours, theirs = ([repeat for repeat in side if repeat.seed in shared] for side in (a, b))
    return ours, theirs, [seed for seed in every if seed not in shared]


def compare(
    a: Sequence[Repeat] | float, b: Sequence[Repeat], rng: np.random.Generator,
    resamples: int = RESAMPLES,
) -> Estimate:  # fmt: skip
    """Returns the ratio of B to A; A may be a number that is taken as exact."""
    if isinstance(a, (int, float)):
        ratio, sides = log_mean(b) - math.log(a), [b]
    elif len(seeds := shared_seeds(a, b)) < 2:
        ratio, sides = log_mean(b) - log_mean(a), [b, a]
    else:
        old, new = ({runs[0].seed: log_mean(runs) for runs in by_seed(side)} for side in (a, b))
        pairs = np.array([new[seed] - old[seed] for seed in seeds])
        draws = [_resampled_means(pairs, rng, resamples)]
        unit = f"{len(pairs)} pairs of seeds"
        return _estimate(float(np.mean(pairs)), draws, rng, unit)
    if min(map(len, sides)) > 1:
        draws = [_of_repeats(side, rng, resamples) for side in sides]
        unit = " and ".join(str(len(side)) for side in reversed(sides)) + " repeats"
        return _estimate(ratio, draws, rng, unit)
    if any(len(repeat.values) < 2 for side in sides for repeat in side):
        return Estimate(ratio, None, "one number each: no interval")
    draws = [_of_steps(side, rng, resamples) for side in sides]
    lengths = [length for side in draws for length in side.lengths]
    few, many = min(lengths), max(lengths)
    unit = f"blocks of {few}" if few == many else f"blocks of {few} to {many}"
    return _estimate(ratio, draws, rng, f"{unit} {'step' if many == 1 else 'steps'}")


def geometric_mean(estimates: Sequence[Estimate]) -> Estimate:
    """Returns the geometric mean of the ratios of several points."""
    ratio = float(np.mean([estimate.log_ratio for estimate in estimates]))
    draws = [estimate.draws for estimate in estimates if estimate.draws is not None]
    mean = np.sum(draws, axis=0) / len(estimates) if draws else None
    return Estimate(ratio, mean, f"all {len(estimates)} points together")


def block_length(values: Floats) -> int:
    """Returns the steps of a block: more for longer series, and for those that correlate more."""
    n = len(values)
    centred = values - values.mean()
    power = float(centred @ centred)
    rho = float(centred[1:] @ centred[:-1]) / power if power > 0 else 0.0
    rho += (1 + 3 * max(rho, 0.0)) / n  # the estimate is too low for short series, by about this
    rho = min(max(rho, 0.0), 0.95)
    optimal = math.pow(math.sqrt(6) * rho / (1 - rho**2), 2 / 3) * math.pow(n, 1 / 3)
    return max(1, min(math.ceil(optimal), n // _MIN_BLOCKS))


def _estimate(
    ratio: float, sides: Sequence[_Draws], rng: np.random.Generator, unit: str
) -> Estimate:
    """Returns an estimate: the draws of the first side minus those of the second, widened."""
    total = sides[0].values - sides[1].values if len(sides) > 1 else sides[0].values
    variances = [float(np.var(side.values)) for side in sides]
    degrees = sum(side.degrees for side in sides)
    if sum(variances) > 0:  # of two samples of different spread, after Welch
        terms = [v**2 / side.degrees for v, side in zip(variances, sides, strict=True)]
        degrees = sum(variances) ** 2 / sum(terms)
    widths: Floats = np.sqrt(degrees / rng.chisquare(degrees, len(total)))
    return Estimate(ratio, np.asarray(total * widths), unit)


def _resampled_means(logs: Floats, rng: np.random.Generator, resamples: int) -> _Draws:
    n = len(logs)
    means = logs[rng.integers(n, size=(resamples, n))].mean(axis=1)
    return _Draws((means - logs.mean()) * math.sqrt(n / (n - 1)), n - 1)


def _of_repeats(side: Sequence[Repeat], rng: np.random.Generator, resamples: int) -> _Draws:
    """Returns draws of a side from its runs, or from the attempts if there is one run."""
    runs = by_seed(side)
    if len(runs) > 1:
        return _resampled_means(np.log([median(run) for run in runs]), rng, resamples)
    medians = np.array([np.median(repeat.values) for repeat in side])
    n = len(medians)
    drawn = np.median(medians[rng.integers(n, size=(resamples, n))], axis=1)
    off = np.log(drawn) - math.log(float(np.median(medians)))
    return _Draws(off * math.sqrt(n / (n - 1)), n - 1)


def _of_steps(side: Sequence[Repeat], rng: np.random.Generator, resamples: int) -> _Draws:
    """Returns draws of a side from blocks of steps."""
    degrees, runs, lengths = 0.0, [], []
    for run in by_seed(side):
        medians = []
        for repeat in run:
            values = np.asarray(repeat.values, dtype=np.float64)
            if len(values) > _MAX_STEPS:
                groups = np.array_split(values, _MAX_STEPS)
                values = np.array([np.median(group) for group in groups])
            n, length = len(values), block_length(values)
            lengths.append(length * max(1, len(repeat.values) // n))
            blocks = max(n / length, 2.0)
            degrees += blocks - 1
            # (resamples, blocks, 1) starts and (length,) offsets give the steps of every block; the
            # last block is cut, and one that runs over the end goes on at the first step.
            starts = rng.integers(n, size=(resamples, math.ceil(n / length), 1))
            places = (starts + np.arange(length)).reshape(resamples, -1)[:, :n] % n
            center_log = math.log(np.median(values))
            off = np.log(np.median(values[places], axis=1)) - center_log
            # Few blocks spread less than they should: the deviations are widened.
            medians.append(np.exp(center_log + off * math.sqrt(blocks / (blocks - 1))))
        runs.append(np.log(np.median(medians, axis=0)))
    return _Draws(np.mean(runs, axis=0) - log_mean(side), degrees, lengths)


def _exp(logarithm: float) -> float:
    """Returns a ratio; beyond the range of doubles nearly the largest or smallest one."""
    return math.exp(min(max(logarithm, -_LARGEST), _LARGEST))
