"""Computes one number of the attempts that repeat each other.

A side has the median over the attempts of each seed, and the geometric mean over the seeds: a ratio
of geometric means is the mean of the ratios of the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Repeat:
    """One complete attempt of a point."""

    seed: str
    values: Sequence[float]  # of every step that counts, or the one number of the attempt; above 0


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
