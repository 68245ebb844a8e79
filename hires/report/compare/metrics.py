"""What can be compared, in which unit, and which way is better?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hires.core.units import GIB, MIB
from hires.report.load.plain_values import count, dicts, dig, discarded_steps, number

Record = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """One number of a run."""

    name: str
    what: str
    unit: str
    """Unit in which it is shown."""
    higher_is_better: bool
    words: tuple[str, str]
    """What it is called if the number is lower, and if it is higher."""
    values: Callable[[Record], list[float]]
    """Gives the numbers of a complete attempt in the base unit: one a step, or one for all. A
    number that is not finite is NaN."""
    units: Mapping[str, float] = field(default_factory=dict)
    """Units that may be written, and how many of the base unit they are."""

    def shown(self, value: float) -> float:
        """Returns a number of the base unit in the unit in which it is shown."""
        return value / self.units[self.unit]

    def word(self, up: bool) -> str:
        """Returns what a higher (``up``) or lower number is called."""
        return self.words[up]


def counted_steps(record: Record) -> list[float]:
    """Returns the seconds of the steps that count, in their order."""
    out = discarded_steps(record)
    found = []
    for sample in dicts(record.get("samples")):
        took = number(sample.get("step_s"))
        if took is not None and took > 0 and count(sample.get("step")) not in out:
            found.append(took)
    return found


def _rates(record: Record) -> list[float]:
    """Returns images per second of the steps that count."""
    images = count(record.get("images_per_step")) or 0
    return [images / step_s for step_s in counted_steps(record)] if images else []


def _peak(record: Record) -> list[float]:
    """Returns the bytes of the fullest rank."""
    known = [n for n in (count(e.get("peak_bytes")) for e in dicts(record.get("memory"))) if n]
    return [float(max(known))] if known else []


def _last_loss(record: Record) -> list[float]:
    """Returns the loss of the last step."""
    if dig(record, "loss", "finite") is False:
        return [math.nan]
    last = number(dig(record, "loss", "last"))
    return [] if last is None else [last]


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "throughput",
            "images per second, median over complete attempts of each one's median step",
            "img/s",
            True,
            ("slower", "faster"),
            _rates,
            {"img/s": 1.0},
        ),
        Metric(
            "step_time",
            "seconds a step, median over complete attempts of each one's median step",
            "s",
            False,
            ("faster", "slower"),
            counted_steps,
            {"s": 1.0, "ms": 1e-3},
        ),
        Metric(
            "memory",
            "peak of the fullest rank, median over complete attempts",
            "MiB",
            False,
            ("less", "more"),
            _peak,
            {"MiB": MIB, "GiB": GIB, "B": 1.0},
        ),
        Metric(
            "loss",
            "loss of the last step, median over complete attempts",
            "1",
            False,
            ("lower", "higher"),
            _last_loss,
            {"1": 1.0},
        ),
    )
}
