"""Decides whether a point is better or worse than it was, or shows no difference.

It differs if the confidence interval of the ratio excludes 1 and the ratio is outside the
tolerance: the first makes chance unlikely, the second says that the difference matters. If it does
not differ and the interval is much wider than the tolerance, nothing is decided; nor is it of times
that have no interval.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from hires.core.errors import ConfigError
from hires.report.compare import bootstrap
from hires.report.compare.bootstrap import Estimate, Repeat, center, paired, usable
from hires.report.compare.metrics import ComparedPoint, Metric
from hires.report.runs import repeats_of

BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "same", "unknown"
UNDECIDED = "undecided"
OVERALL = "overall"
_FAILED = ("failed", "lost")  # states that count as worse; a user cancels a run on purpose
_UNDECIDED_WIDTH = 2.0  # widths of the tolerance; a wider interval shows nothing
_FINEST = 0.01  # a smaller tolerance means any difference; no interval is as narrow as that
_PERCENT = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be off, as fractions of what it should be."""

    low: float  # at most 0
    high: float  # at least 0

    @property
    def width(self) -> float:
        """Logarithm of the upper end over the lower one."""
        return math.log((1 + max(self.high, _FINEST)) / (1 + min(self.low, -_FINEST)))

    def __str__(self) -> str:
        return f"{100 * self.low:+g}%,{100 * self.high:+g}%"


@dataclass(frozen=True)
class Settings:
    """Tolerance, and the bootstrap's settings."""

    tolerance: Tolerance
    seed: int = 0
    resamples: int = bootstrap.RESAMPLES


@dataclass(frozen=True)
class PointVerdict:
    """The verdict on one point, or on all."""

    point: str
    metric: Metric
    status: str  # ``better``, ``worse``, ``same``, ``undecided`` or ``unknown``
    verdict: str  # the same in the metric's own words
    why: str  # what was resampled, or why the verdict is unknown
    a: float | None = None
    b: float | None = None  # both in the base unit
    repeats: tuple[int, int] = (0, 0)
    ratio: float | None = None
    interval: tuple[float, float] | None = None  # of the ratio
    tolerance: Tolerance | None = None
    unpaired_seeds: Sequence[str] = ()  # that are left out because one side lacks them
    estimate: Estimate | None = field(default=None, compare=False, repr=False)
    """The ratio with its draws, if both sides have numbers."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        keys = ("point", "status", "verdict", "why", "repeats", "ratio", "interval")
        return {
            **{key: getattr(self, key) for key in keys},
            "metric": self.metric.name,
            "unit": self.metric.unit,
            "a": self.metric.shown(self.a),
            "b": self.metric.shown(self.b),
            "tolerance": self.tolerance and vars(self.tolerance),
        }


def parse_tolerance(words: str) -> Tolerance:
    """Returns the tolerance that ``5%`` or ``-5%,+15%`` stands for; ConfigError: it is none."""
    parts = [_PERCENT.fullmatch(part.strip()) for part in words.split(",")]
    numbers = [float(part[1]) / 100 if part is not None else math.nan for part in parts]
    if len(numbers) == 1:
        numbers = [-numbers[0], numbers[0]]
    if len(numbers) != 2 or not -1 < numbers[0] <= 0 <= numbers[1]:
        raise ConfigError(
            f"tolerance {words!r} is none; write 5% for both ways, or -5%,+15% for less and more"
        )
    return Tolerance(numbers[0], numbers[1])


def judge(
    label: str, metric: Metric, a: ComparedPoint | float, b: ComparedPoint, settings: Settings
) -> PointVerdict:
    """Returns the verdict on a point of B; ``a`` is the point as it was, or as it should be."""
    old = a.repeats(metric) if isinstance(a, ComparedPoint) else []
    new = b.repeats(metric)
    unjudged = _without_numbers(metric, a, old, b, new)
    if unjudged is not None:
        return PointVerdict(label, metric, *unjudged)
    rng = np.random.default_rng([settings.seed, zlib.crc32(f"{metric.name} {label}".encode())])
    # The numbers shown are those of the runs in the ratio, or the two would contradict each other.
    old, new, unpaired = paired(old, new)
    exact = None if isinstance(a, ComparedPoint) else a
    estimate = bootstrap.compare(exact or old, new, rng, settings.resamples)
    return replace(
        _decided(label, metric, estimate, settings.tolerance),
        a=exact or center(old), b=center(new),
        repeats=(len(old), len(new)), unpaired_seeds=unpaired,
    )  # fmt: skip


def overall(metric: Metric, points: Sequence[PointVerdict], settings: Settings) -> PointVerdict:
    """Returns the verdict on all points together, with their mean tolerance: worse if any is."""
    worse = [point for point in points if point.status == WORSE]
    estimates = [point.estimate for point in points if point.estimate is not None]
    if estimates:
        tolerances = [point.tolerance for point in points if point.tolerance is not None]
        mean = Tolerance(fmean(t.low for t in tolerances), fmean(t.high for t in tolerances))
        verdict = _decided(OVERALL, metric, bootstrap.geometric_mean(estimates), mean)
    else:
        verdict = PointVerdict(OVERALL, metric, UNKNOWN, UNKNOWN, "no point could be compared")
    if not worse:
        return verdict
    word = verdict.verdict if verdict.status == WORSE else worse[0].verdict
    why = f"{len(worse)} of {len(points)} points are worse"
    return replace(verdict, status=WORSE, verdict=word, why=why)


def _decided(label: str, metric: Metric, estimate: Estimate, tolerance: Tolerance) -> PointVerdict:
    interval, ratio = estimate.interval(), estimate.ratio
    low, high = interval or (ratio, ratio)
    widest = _UNDECIDED_WIDTH * tolerance.width
    status, word, why = SAME, "no difference", estimate.unit
    up = ratio > 1 + tolerance.high and low > 1
    if interval is None and metric.is_timed:
        status = word = UNDECIDED
        why += "; repeat the runs, or give them more steps"
    elif up or (ratio < 1 + tolerance.low and high < 1):
        status = BETTER if up == metric.higher_is_better else WORSE
        word = metric.words[up]
    elif math.log(high / low) > widest:
        status = word = UNDECIDED
        why += f": not enough data; about {estimate.repeats_for(widest)} repeats of each would help"
    return PointVerdict(
        label, metric, status, word, why,
        ratio=ratio, interval=interval, tolerance=tolerance, estimate=estimate,
    )  # fmt: skip


def _without_numbers(
    metric: Metric, a: ComparedPoint | float, old: Sequence[Repeat],
    b: ComparedPoint, new: Sequence[Repeat],
) -> tuple[str, str, str] | None:  # fmt: skip
    """Returns status, word and reason if a side has no numbers to compare; None if both do."""
    if isinstance(a, ComparedPoint) and (why := _missing(a, old)):
        return UNKNOWN, UNKNOWN, f"A: {metric.name} is missing ({why})"
    state, cause = b.trouble()
    newly = not isinstance(a, ComparedPoint) or a.trouble()[0] not in _FAILED
    if state in _FAILED and (newly or not repeats_of(b.runs)):
        return WORSE, state, f"B: {cause or state}"
    if any(not math.isfinite(value) for repeat in new for value in repeat.values):
        return WORSE, metric.words[not metric.higher_is_better], f"B: {metric.name} is not finite"
    if why := _missing(b, new):
        return UNKNOWN, UNKNOWN, f"B: {metric.name} is missing ({why})"
    return (UNKNOWN, "not comparable", metric.incomparable) if metric.incomparable else None


def _missing(point: ComparedPoint, repeats: Sequence[Repeat]) -> str | None:
    """Returns why the numbers of a point cannot be compared; None if they can."""
    values = [value for repeat in repeats for value in repeat.values]
    if values:
        wrong = [value for value in values if not usable([value])]
        return f"it recorded {wrong[0]:g}, of which there is no ratio" if wrong else None
    if repeats_of(point.runs):
        return "it recorded none"
    return f"{point.trouble()[0]}: no attempt is complete"
