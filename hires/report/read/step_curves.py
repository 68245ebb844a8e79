"""Turns the lines of steps and evaluations into curves: a number by the steps that were done."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from hires.core.store.reading import Values
from hires.report.read.plain_values import count, number

Curve = dict[int, float]


def loss_by_step(lines: Iterable[Values]) -> Curve:
    """Returns the finite losses of the lines of steps by step, each the mean over its ranks."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        step, loss = count(line.get("step")), number(line.get("loss"))
        if step is not None and loss is not None:
            by_step[step].append(loss)
    return {step: math.fsum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)}


def number_by_step(lines: Iterable[Values], key: str) -> Curve:
    """Returns a number of the lines by their step, of the first rank that has it."""
    curve: Curve = {}
    for line in lines:
        step, value = count(line.get("step")), number(line.get(key))
        if step is not None and value is not None:
            curve.setdefault(step, value)
    return dict(sorted(curve.items()))
