"""Defines the metrics that runs are compared by: their numbers, units and better direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hires.core.units import MIB
from hires.report.record import RunRecord


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
        Metric(
            "loss", "loss_last", f"loss of the last step, {_ATTEMPTS}", "1",
            False, ("lower", "higher"), _last_loss,
        ),
    )
}  # fmt: skip


def per_image(metric: Metric) -> Metric:
    """Returns a metric for sides with other batches: of an image, or not comparable."""
    if metric.name in ("throughput", "accuracy"):
        return metric
    if metric.name != "step_time":
        return replace(metric, incomparable="the sides have other batches; compare equal ones")

    def values(record: RunRecord) -> list[float]:
        images = record.images_per_step or 0
        return [step_s / images for step_s in metric.values(record)] if images else []

    what = metric.what.replace("a step", "an image")
    return replace(metric, name="step_time_per_image", what=what, values=values)
