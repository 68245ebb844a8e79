"""Computes the number of a point that was measured several times.

A run counts as the median over its attempts of each one's median (:func:`of_run`); several seeds
are several runs, and count as their geometric mean. If two sides share several seeds, only these
count (:func:`paired`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BOUND = 1e100
"""Beyond anything that is measured in any unit; sums and squares of smaller numbers are finite."""


@dataclass(frozen=True)
class Repeat:
    """One complete attempt of a point."""

    seed: str
    values: Sequence[float]
    """Of every step that counts, or the one number of the attempt; above 0."""


def of_run(repeats: Sequence[Repeat]) -> float:
    """Returns the number of a run: the median over its attempts of each one's median."""
    with np.errstate(over="ignore"):
        return float(np.median([np.median(repeat.values) for repeat in repeats]))


def usable(values: Sequence[float]) -> bool:
    """Whether numbers can be compared: all are finite, above 0 and below any bound."""
    return all(1 / _BOUND < value < _BOUND for value in values)


def middle(repeats: Sequence[Repeat]) -> float | None:
    """Returns the number of a point: of its run, or the geometric mean over its seeds.

    It is None unless all values can be compared.
    """
    values = [value for repeat in repeats for value in repeat.values]
    if not values or not usable(values):
        return None
    return of_run(repeats) if len(by_seed(repeats)) == 1 else math.exp(centre(repeats))


def by_seed(side: Sequence[Repeat]) -> list[list[Repeat]]:
    """Returns the repeats of every seed."""
    runs: dict[str, list[Repeat]] = {}
    for repeat in side:
        runs.setdefault(repeat.seed, []).append(repeat)
    return list(runs.values())


def centre(side: Sequence[Repeat]) -> float:
    """Returns the logarithm of the number of a side."""
    return float(np.mean(np.log([of_run(run) for run in by_seed(side)])))


def shared_seeds(a: Sequence[Repeat], b: Sequence[Repeat]) -> list[str]:
    """Returns the seeds that both sides have, in the order of A."""
    seeds = {repeat.seed for repeat in b}
    return [seed for seed in dict.fromkeys(repeat.seed for repeat in a) if seed in seeds]


def paired(
    a: Sequence[Repeat], b: Sequence[Repeat]
) -> tuple[list[Repeat], list[Repeat], list[str]]:
    """Returns the repeats by which two sides are compared, and the seeds that are left out.

    With several shared seeds these are compared in pairs and the others left out; otherwise all
    repeats count.
    """
    shared = shared_seeds(a, b)
    if len(shared) < 2:
        return list(a), list(b), []
    kept = [[repeat for repeat in side if repeat.seed in shared] for side in (a, b)]
    alone = dict.fromkeys(r.seed for r in [*a, *b] if r.seed not in shared)
    return kept[0], kept[1], list(alone)
