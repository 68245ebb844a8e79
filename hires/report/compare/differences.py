"""Lists what differs between two sets of runs: config, code, versions, machine and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hires.core.store.reading import text
from hires.core.units import size
from hires.report.compare.metrics import METRICS
from hires.report.compare.pairing import ComparedPoint
from hires.report.load.plain_values import count, dig, listed, value_text
from hires.report.load.repeats import median
from hires.report.load.rows import run_row
from hires.report.load.runs import Run

_PLACES = ("campaign", "results")
"""Keys that say where a run is kept."""
_MAX_VALUES = 4
"""Values that are listed before the others are counted."""
_NUMBERS = {
    "img_per_s_median": "throughput [img/s]",
    "step_s_median": "step time [s]",
    "samples": "steps that count",
    "peak_bytes_max": "fullest rank [bytes]",
    "predicted_bytes_max": "fullest rank predicted [bytes]",
    "messages_per_step": "messages a step",
    "bytes_per_step": "sent a step [bytes]",
    "loss_first": "first loss",
    "loss_last": "last loss",
    "state": "state",
}
"""Columns of a run that are shown beside another run's, with their titles."""
_ORIGIN = {
    "commit": ("git",),
    "processor": ("hardware", "cpu"),
    **{name: (name,) for name in ("hires", "torch", "python", "host")},
}
"""Where a provenance holds what is shown of it."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same."""

    what: str
    a: str
    b: str


def run_differences(
    a: Sequence[Run], b: Sequence[Run]
) -> tuple[list[Difference], list[Difference]]:
    """Returns what differs of the configs, keys of one side among them, and of code and machine."""
    config = named_differences(*([run.flat_config for run in side] for side in (a, b)))
    machine = named_differences(*([origin(run.provenance) for run in side] for side in (a, b)))
    return [one for one in config if one.what not in _PLACES], machine


def named_differences(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> list[Difference]:
    """Returns the keys whose sets of values differ, with these values as text."""
    differences = []
    for key in dict.fromkeys(key for values in [*a, *b] for key in values):
        x, y = (list(dict.fromkeys(_word(v[key]) for v in side if key in v)) for side in (a, b))
        if set(x) != set(y):
            ours, theirs = (listed(words, _MAX_VALUES) or "-" for words in (x, y))
            differences.append(Difference(key, ours, theirs))
    return differences


def number_rows(a: Run, b: Run) -> list[tuple[str, Any, Any]]:
    """Returns title and values of the numbers that at least one of two runs has.

    Metrics are those of the whole run, as in ``compare``; the others are the last attempt's.
    """
    numbers = []
    for run in (a, b):
        row, point = run_row(run), ComparedPoint([run])
        for metric in METRICS.values() if point.attempts() else ():
            repeats = point.repeats(metric)
            value = median(repeats) if repeats else math.nan
            row[metric.column] = value if math.isfinite(value) else None
        numbers.append(row)
    ours, theirs = numbers
    rows = [(title, ours.get(key), theirs.get(key)) for key, title in _NUMBERS.items()]
    return [row for row in rows if row[1:] != (None, None)]


def origin(provenance: Any) -> dict[str, str | None]:
    """Returns code, versions and machine of a record's provenance as names and words."""
    facts = {name: text(dig(provenance, *path), 80) for name, path in _ORIGIN.items()}
    cores, memory = (count(dig(provenance, "hardware", key)) for key in ("cores", "memory"))
    facts["cores"] = None if cores is None else str(cores)
    return {**facts, "memory": None if memory is None else size(memory)}


def _word(value: Any) -> str:
    return "not recorded" if value is None else value_text(value)
