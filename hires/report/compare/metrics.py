"""Defines the metrics that runs are compared by, and pairs the points of two sets of runs.

A point is a config without the seed and the keys that change nothing. A key with one value on each
side, and another on the other side, is what the sides are compared about; it keeps no pair apart,
unless it changes the work of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hires.core.evaluation_summary import METRICS as EVALUATION
from hires.core.store.reading import text
from hires.core.units import MIB
from hires.report.columns import value_text
from hires.report.compare.bootstrap import Repeat
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
    incomparable: str = ""  # why numbers of the two sides are not comparable; empty if they are

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


def _last_loss(record: RunRecord) -> list[float]:
    return [math.nan] if record.loss.finite is False else _one(record.loss.last)


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


_STEPS = "median over complete attempts of each one's median step"
_ATTEMPTS = "median over complete attempts"
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
            False, ("lower", "higher"), _last_loss,
        ),
    )
}  # fmt: skip


def per_image(metric: Metric) -> Metric:
    """Returns a metric for sides with other batches: of an image, or not comparable."""
    if metric.name in ("throughput", "accuracy", *EVALUATION):
        return metric
    if metric.name != "step_time":
        return replace(metric, incomparable="the sides have other batches; compare equal ones")

    def values(record: RunRecord) -> list[float]:
        images = record.images_per_step or 0
        return [step_s / images for step_s in metric.values(record)] if images else []

    what = metric.what.replace("a step", "an image")
    return replace(metric, name="step_time_per_image", what=what, values=values)


WORK = ("image", "task.name")
"""Keys whose values make the numbers of an image different work."""
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
