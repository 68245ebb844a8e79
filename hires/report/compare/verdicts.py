"""Pairs the points of two sets of runs, and decides by a metric which is better or worse.

A point is a config without the seed and the keys that change nothing. A key with one value on each
side, and another on the other side, is what the sides are compared about; it keeps no pair apart,
unless it changes the work of an image.

A point differs if the confidence interval of the ratio excludes 1 and the ratio is outside the
tolerance: the first makes chance unlikely, the second says that the difference matters. If it does
not differ and the interval is much wider than the tolerance, nothing is decided; nor is it of times
that have no interval.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from hires.core.errors import ConfigError
from hires.core.evaluation_summary import METRICS as EVALUATION
from hires.core.store.reading import text
from hires.core.units import MIB
from hires.report.columns import value_text
from hires.report.compare import bootstrap
from hires.report.compare.bootstrap import Estimate, Repeat, center, paired, usable
from hires.report.record import RunRecord
from hires.report.runs import INPUTS, SEED, Run, repeats_of


@dataclass(frozen=True)
class Metric:
    """One number of a run."""

    name: str
    column: str  # column of the frame of runs that holds its one number
    what: str
    unit: str  # unit in which it is shown
    higher_is_better: bool
    words: tuple[str, str]  # what a lower and a higher number are called
    values: Callable[[RunRecord], list[float]]
    """Returns the numbers of a complete attempt in the base unit: one a step, or one for all. A
    number that is not finite is NaN."""
    base: float = 1.0  # of its unit, in the base unit
    is_timed: bool = False  # a number alone says little: steps and machines vary

    def shown(self, value: float | None) -> float | None:
        """Returns a number of the base unit in the unit in which it is shown."""
        return None if value is None else value / self.base


def _rates(record: RunRecord) -> list[float]:
    # The median of an even number of rates is the mean of two, not the rate of the median step, as
    # the record has it: so the two middle steps count as their mean.
    images, steps = record.images_per_step or 0, record.counted_s
    if steps and len(steps) % 2 == 0:
        by_time, half = sorted(range(len(steps)), key=steps.__getitem__), len(steps) // 2
        middle = by_time[half - 1 : half + 1]
        mean = sum(steps[place] for place in middle) / 2
        steps = [mean if place in middle else step_s for place, step_s in enumerate(steps)]
    return [images / step_s for step_s in steps] if images else []


def _one(number: float | None) -> list[float]:
    return [] if number is None else [float(number)]


def _of_evaluation(name: str) -> Metric:
    """Returns a registered metric."""
    metric, words = EVALUATION[name], ("lower", "higher")
    what = f"{metric.title} of an evaluation, {_ATTEMPTS}"

    def values(record: RunRecord) -> list[float]:
        return _one(getattr(record.evaluation, name, None))

    unit, better = metric.unit or "1", metric.larger_is_better
    return Metric(name, name, what, unit, better, words, values, 1 / metric.factor)


_ATTEMPTS = "median over complete attempts"
_STEPS = f"{_ATTEMPTS} of each one's median step"
METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "throughput", "img_per_s_median", f"images per second, {_STEPS}", "img/s",
            True, ("slower", "faster"), _rates, is_timed=True,
        ),
        Metric(
            "step_time", "step_s_median", f"seconds a step, {_STEPS}", "s",
            False, ("faster", "slower"), lambda record: record.counted_s, is_timed=True,
        ),
        Metric(
            "memory", "peak_bytes_max", f"highest peak of a rank, {_ATTEMPTS}", "MiB",
            False, ("less", "more"), lambda record: _one(record.peak_bytes), MIB,
        ),
        Metric(
            "accuracy", "top1", f"share of right answers of an evaluation, {_ATTEMPTS}", "%",
            True, ("lower", "higher"), lambda record: _one(record.top1), 0.01,
        ),
        *map(_of_evaluation, EVALUATION),
        Metric(
            "loss", "loss_last", f"loss of the last step, {_ATTEMPTS}", "1",
            False, ("lower", "higher"),
            lambda record: [math.nan] if record.loss.finite is False else _one(record.loss.last),
        ),
    )
}  # fmt: skip


WORK = ("image", "task.name")
"""Keys whose values make the numbers of an image different work."""
OF_A_STEP = ("step_time", "memory", "loss")
"""Metrics of which sides with other batches say nothing."""
_COLUMNS = ("model", "image", "layout", "precision")
_MAX_LABEL = 160  # characters
_Key = tuple[tuple[str, str], ...]


@dataclass
class ComparedPoint:
    """The runs of one config on one side; none if the side lacks it."""

    runs: list[Run] = field(default_factory=list)

    def num_left_out(self) -> int:
        """Returns the number of complete attempts by other code or machines."""
        return sum(len(run.complete) for run in self.runs) - len(repeats_of(self.runs))

    def repeats(self, metric: Metric) -> list[Repeat]:
        """Returns the numbers of all attempts that count and have any."""
        repeats = [
            Repeat(value_text(run.config.get(SEED)), metric.values(record))
            for run, record in repeats_of(self.runs)
        ]
        return [repeat for repeat in repeats if repeat.values]

    def trouble(self) -> tuple[str, str | None]:
        """Returns state and cause of a run that is not done; ``done`` if all are."""
        ends = [run.end for run in self.runs if run.end[0] != "done"]
        state, reason, cause = ends[0] if ends else ("done", None, None)
        return state, cause or reason


Pair = tuple[str, ComparedPoint, ComparedPoint]  # label of a point, and its runs on either side


def pair(a: Sequence[Run], b: Sequence[Run]) -> list[Pair]:
    """Returns the points of two sets of runs, those that only B has last."""
    # Networks are edited between A and B: their source parts runs only if a side has several.
    inputs = () if _differ_in_inputs(a) or _differ_in_inputs(b) else INPUTS.values()
    configs = [[run.identity(SEED, *inputs) for run in side] for side in (a, b)]
    about = set()
    for key in {key for side in configs for config in side for key in config} - {*WORK}:
        ours, theirs = ({config.get(key) for config in side} for side in configs)
        if len(ours) == len(theirs) == 1 and ours != theirs:
            about.add(key)
    points: dict[_Key, tuple[ComparedPoint, ComparedPoint]] = {}
    for side, runs in enumerate((a, b)):
        for run, config in zip(runs, configs[side], strict=True):
            point = tuple(sorted((k, v) for k, v in config.items() if k not in about))
            points.setdefault(point, (ComparedPoint(), ComparedPoint()))[side].runs.append(run)
    labels = _labels(points)
    return [(labels[key], *sides) for key, sides in points.items()]


def _differ_in_inputs(runs: Sequence[Run]) -> bool:
    """Whether two of some runs differ in the contents that their configs name, and in no key."""
    every = {tuple(sorted(run.identity(SEED).items())) for run in runs}
    keys = INPUTS.values()
    return len({tuple(pair for pair in one if pair[0] not in keys) for one in every}) < len(every)


def points(runs: Sequence[Run]) -> list[tuple[str, ComparedPoint]]:
    """Returns the points of one set of runs, each with its label."""
    return [(label, point) for label, point, _ in pair(runs, [])]


def _labels(points: Mapping[_Key, Sequence[ComparedPoint]]) -> dict[_Key, str]:
    """Labels every point by its columns, and by the keys in which equal labels differ."""
    same_columns: dict[str, list[_Key]] = {}
    for key, sides in points.items():
        rows = [side.runs[0].point for side in sides if side.runs]
        # A column with another value on each side is shown as ``fp32->bf16``.
        values = ([str(row.get(column) or "?") for row in rows] for column in _COLUMNS)
        words = " ".join("->".join(dict.fromkeys(sides)) for sides in values)
        same_columns.setdefault(words, []).append(key)
    labels: dict[_Key, str] = {}
    for words, group in same_columns.items():
        configs = [dict(key) for key in group]
        names = dict.fromkeys(name for config in configs for name in config)
        differing = [n for n in names if len({config.get(n) for config in configs}) > 1]
        for key, config in zip(group, configs, strict=True):
            own = [f"{name}={config[name]}" for name in differing if name in config]
            labels[key] = text(" ".join([words, *own]), _MAX_LABEL) or "?"
    return labels


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
    status, word, why = SAME, "no difference", estimate.unit
    up = ratio > 1 + tolerance.high and low > 1
    if interval is None and metric.is_timed:
        status = word = UNDECIDED
        why += "; repeat the runs, or give them more steps"
    elif up or (ratio < 1 + tolerance.low and high < 1):
        status = BETTER if up == metric.higher_is_better else WORSE
        word = metric.words[up]
    elif math.log(high / low) > _UNDECIDED_WIDTH * tolerance.width:
        status = word = UNDECIDED
        why += ": not enough data; three repeats of each or more would help"
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
    why = _missing(b, new)
    return (UNKNOWN, UNKNOWN, f"B: {metric.name} is missing ({why})") if why else None


def _missing(point: ComparedPoint, repeats: Sequence[Repeat]) -> str | None:
    """Returns why the numbers of a point cannot be compared; None if they can."""
    values = [value for repeat in repeats for value in repeat.values]
    if values:
        wrong = [value for value in values if not usable([value])]
        return f"it recorded {wrong[0]:g}, of which there is no ratio" if wrong else None
    if repeats_of(point.runs):
        return "it recorded none"
    return f"{point.trouble()[0]}: no attempt is complete"
