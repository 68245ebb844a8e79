"""Is a point better or worse than it was, or is there no difference?

It differs if the confidence interval of the ratio leaves out 1 and the ratio itself is outside the
tolerance: the first says that chance alone hardly does it, the second that it matters. If it does
not differ, and the interval is much wider than the tolerance, nothing is decided.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hires.core.errors import ConfigError
from hires.report.compare import bootstrap
from hires.report.compare.bootstrap import Estimate
from hires.report.compare.metrics import Metric
from hires.report.compare.pairing import Point
from hires.report.compare.repeated_points import Repeat, middle, paired, usable

BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "same", "unknown"
UNDECIDED = "undecided"
DECIDED = (BETTER, WORSE, SAME)
NO_DIFFERENCE = "no difference"
OVERALL = "overall"
_FAILED = ("failed", "lost")
"""States of a run that somebody must look at; who cancelled one knows of it."""
_MUCH_WIDER = 2.0
"""An interval that is so many times as wide as the tolerance does not say that nothing changed."""
_FINEST = 0.01
"""A tolerance below asks whether there is any difference, and no interval is narrower than none."""
_PERCENT = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be off, as fractions of what it should be."""

    low: float
    """At most 0."""
    high: float
    """At least 0."""

    @property
    def width(self) -> float:
        """Logarithm of the upper end over the lower one."""
        return math.log((1 + max(self.high, _FINEST)) / (1 + min(self.low, -_FINEST)))

    def __str__(self) -> str:
        return f"{100 * self.low:+g}%,{100 * self.high:+g}%"


@dataclass(frozen=True)
class Settings:
    """How sure one wants to be."""

    tolerance: Tolerance
    seed: int = 0
    resamples: int = bootstrap.RESAMPLES
    confidence: float = bootstrap.CONFIDENCE


@dataclass(frozen=True)
class Result:
    """What became of one point, or of all."""

    point: str
    metric: Metric
    status: str
    """``better``, ``worse``, ``same``, ``undecided`` or ``unknown``."""
    verdict: str
    """The same in the metric's own words."""
    why: str
    """What was drawn, or why nothing is known."""
    a: float | None = None
    b: float | None = None
    """In the base unit."""
    repeats: tuple[int, int] = (0, 0)
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    tolerance: Tolerance | None = None
    alone: Sequence[str] = ()
    """Seeds that count nowhere because one side lacks them."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        tolerance = None if self.tolerance is None else dataclasses.asdict(self.tolerance)
        return {
            **{key: getattr(self, key) for key in ("point", "status", "verdict", "why")},
            "metric": self.metric.name,
            "unit": self.metric.unit,
            "a": None if self.a is None else self.metric.shown(self.a),
            "b": None if self.b is None else self.metric.shown(self.b),
            "repeats": list(self.repeats),
            "ratio": self.ratio,
            "interval": None if self.low is None else [self.low, self.high],
            "tolerance": tolerance,
        }


def parse_tolerance(said: str) -> Tolerance:
    """Returns the tolerance that ``5%`` or ``-5%,+15%`` means.

    Raises:
        ConfigError: it means none.
    """
    parts = [_PERCENT.fullmatch(part.strip()) for part in said.split(",")]
    numbers = [float(part[1]) / 100 if part is not None else math.nan for part in parts]
    if len(numbers) == 1:
        numbers = [-numbers[0], numbers[0]]
    if len(numbers) != 2 or not -1 < numbers[0] <= 0 <= numbers[1]:
        raise ConfigError(
            f"tolerance {said!r} is none; write 5% for both ways, or -5%,+15% for less and more"
        )
    return Tolerance(numbers[0], numbers[1])


def judge(
    label: str, metric: Metric, a: Point, b: Point, settings: Settings
) -> tuple[Result, Estimate | None]:
    """Returns what became of a point, and the estimate if there is one.

    Args:
        label: of the point.
        metric: what is compared.
        a: the point as it was.
        b: as it is.
        settings: tolerance and draws.
    """
    old, new = a.repeats(metric), b.repeats(metric)
    told = _without(label, metric, a, old) or _unusual(label, metric, b, new)
    if told is None and b.trouble()[0] in _FAILED and a.trouble()[0] not in _FAILED:
        told = _failed(label, metric, b)
    if told is not None:
        return told, None
    rng = generator(settings.seed, label, metric)
    # What is shown is of the same runs as the ratio, or the two would contradict each other.
    old, new, alone = paired(old, new)
    estimate = bootstrap.compare(old, new, rng, settings.resamples)
    made = _decided(label, metric, estimate, settings)
    made = dataclasses.replace(made, repeats=(len(old), len(new)), alone=alone)
    return dataclasses.replace(made, a=middle(old), b=middle(new)), estimate


def judge_beside(
    label: str, metric: Metric, value: float, b: Point, settings: Settings
) -> tuple[Result, Estimate | None]:
    """Returns what became of a point beside a reference.

    Args:
        label: of the point.
        metric: what is compared.
        value: what it should be, in the base unit.
        b: the point as it is.
        settings: tolerance and draws.
    """
    new = b.repeats(metric)
    told = _unusual(label, metric, b, new)
    if told is not None:
        return told, None
    rng = generator(settings.seed, label, metric)
    estimate = bootstrap.beside(value, new, rng, settings.resamples)
    made = _decided(label, metric, estimate, settings)
    return dataclasses.replace(made, a=value, b=middle(new), repeats=(0, len(new))), estimate


def overall(
    metric: Metric, results: Sequence[Result], estimates: Sequence[Estimate], settings: Settings
) -> Result:
    """Returns the verdict on all points together: worse if any of them is.

    Args:
        metric: what was compared.
        results: of all points.
        estimates: of those that have one.
        settings: draws; what does not matter is the mean of the points' tolerances.
    """
    worse = [result for result in results if result.status == WORSE]
    told = f"{len(worse)} of {len(results)} points are worse" if worse else None
    if not estimates:
        if told is not None:
            return Result(OVERALL, metric, WORSE, worse[0].verdict, told)
        return Result(OVERALL, metric, UNKNOWN, "unknown", "no point could be compared")
    known = [result.tolerance for result in results if result.tolerance is not None]
    low, high = (
        sum(ends) / len(known) for ends in zip(*((t.low, t.high) for t in known), strict=True)
    )
    settings = dataclasses.replace(settings, tolerance=Tolerance(low, high))
    made = _decided(OVERALL, metric, bootstrap.together(estimates), settings)
    if told is None or made.status == WORSE:
        return made if told is None else dataclasses.replace(made, why=told)
    return dataclasses.replace(made, status=WORSE, verdict=worse[0].verdict, why=told)


def generator(seed: int, label: str, metric: Metric) -> np.random.Generator:
    """Returns what draws for a point, the same in every call."""
    return np.random.default_rng([seed, zlib.crc32(f"{metric.name} {label}".encode())])


def _decided(label: str, metric: Metric, estimate: Estimate, settings: Settings) -> Result:
    """Returns the verdict that an estimate leads to."""
    interval = estimate.interval(settings.confidence)
    low, high = interval or (None, None)
    ratio, tolerance = estimate.ratio, settings.tolerance
    status, word = SAME, NO_DIFFERENCE
    up = ratio > 1 + tolerance.high and (low is None or low > 1)
    down = ratio < 1 + tolerance.low and (high is None or high < 1)
    if up or down:
        status = BETTER if up == metric.higher_is_better else WORSE
        word = metric.word(up)
    why = estimate.unit
    widest = _MUCH_WIDER * tolerance.width
    if status == SAME and low is not None and high is not None and math.log(high / low) > widest:
        status = word = UNDECIDED
        why += f": not enough data; about {estimate.repeats_for(widest)} repeats of each would help"
    made = Result(label, metric, status, word, why, tolerance=tolerance)
    return dataclasses.replace(made, ratio=ratio, low=low, high=high)


def _unusual(label: str, metric: Metric, point: Point, new: Sequence[Repeat]) -> Result | None:
    """Returns what to say of a point of B that has no number to compare, or no finite one."""
    if not point.attempts() and point.trouble()[0] in _FAILED:
        return _failed(label, metric, point)
    if any(not math.isfinite(value) for repeat in new for value in repeat.values):
        why = f"B: {metric.name} is not finite"
        return Result(label, metric, WORSE, metric.word(not metric.higher_is_better), why)
    return _without(label, metric, point, new, "B")


def _failed(label: str, metric: Metric, point: Point) -> Result:
    """Returns what to say of a point of B with a run that failed."""
    state, cause = point.trouble()
    return Result(label, metric, WORSE, state, f"B: {cause or state}")


def _without(
    label: str, metric: Metric, point: Point, repeats: Sequence[Repeat], side: str = "A"
) -> Result | None:
    """Returns what to say of a point without numbers that can be compared."""
    values = [value for repeat in repeats for value in repeat.values]
    if values and usable(values):
        return None
    why = "it recorded none"
    if values:
        odd = next(value for value in values if not usable([value]))
        why = f"it recorded {odd:g}"
    elif not point.attempts():
        why = f"{point.trouble()[0]}: no attempt is complete"
    return Result(label, metric, UNKNOWN, "unknown", f"{side}: {metric.name} is missing ({why})")
