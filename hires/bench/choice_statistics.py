"""Compares predicted with measured steps of layouts: errors, order, and the best of them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NEAR = 0.05
"""A choice within so much of the best measured layout counts as right."""


def at_one_pace(
    steps_s: Sequence[Sequence[float]], pace_s: Sequence[float], then_s: float
) -> list[float]:
    """Returns the seconds of each layout on the machine as it was when a pace took ``then_s``.

    A round is as slow as its layouts are together: each is compared with their geometric mean, and
    that with the pace. Both are medians over the rounds.

    Args:
        steps_s: of each layout, one number a round.
        pace_s: one number a round.
        then_s: what the pace took when the machine was calibrated.
    """
    rounds_s = [statistics.geometric_mean(one) for one in zip(*steps_s, strict=True)]
    common = statistics.median(r / p for r, p in zip(rounds_s, pace_s, strict=True))
    shares = (
        statistics.median(s / r for s, r in zip(one, rounds_s, strict=True)) for one in steps_s
    )
    return [then_s * common * share for share in shares]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns Kendall's tau-a of some pairs of numbers; 1 for fewer than two pairs.

    Source:
        Kendall, "A new measure of rank correlation", Biometrika 30, 1938.
    """
    both = [*itertools.combinations(pairs, 2)]
    if not both:
        return 1.0
    signs = [_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in both]
    return sum(signs) / len(both)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns errors over all cases that were measured, and order and right choices.

    A case of a single layout has no order, and no choice.
    """
    done = [row for row in rows if "error" not in row]
    if not done:
        return {}
    every = [one for row in done for one in row["layouts"]]
    errors = [abs(one["predicted_s"] / one["at_pace_s"] - 1) for one in every]
    generic = [abs(one["generic_s"] / one["at_pace_s"] - 1) for one in every]
    raw = [abs(one["predicted_s"] / one["measured_s"] - 1) for one in every]
    halves = [abs(one["halves_s"][0] / one["halves_s"][1] - 1) for one in every]
    ordered = [row for row in done if len(row["layouts"]) > 1]
    right = [row["behind"] <= NEAR for row in ordered]
    return {
        "mean_error": statistics.mean(errors),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "mean_error_as_measured": statistics.mean(raw),
        "mean_error_of_generic": statistics.mean(generic),
        "mean_error_of_halves": statistics.mean(halves),
        "mean_tau": _mean([row["tau"] for row in ordered]),
        "mean_tau_of_halves": _mean([row["tau_of_halves"] for row in ordered]),
        "right": sum(right),
        "cases": len(ordered),
        "longest_search_s": max(row["search_s"] for row in done),
    }


def _mean(numbers: Sequence[float]) -> float:
    return statistics.mean(numbers) if numbers else 1.0


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
