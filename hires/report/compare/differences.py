"""Lists what differs between two sets of runs: config, code, versions, machine and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hires.core.store.reading import text
from hires.core.units import size
from hires.report.compare.metrics import METRICS
from hires.report.compare.pairing import ComparedPoint
from hires.report.compare.repeated_points import of_run
from hires.report.load.plain_values import count, dig, listed, value_text
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
_METRIC_OF = {
    "img_per_s_median": "throughput",
    "step_s_median": "step_time",
    "peak_bytes_max": "memory",
    "loss_last": "loss",
}
"""Columns that are medians over all complete attempts, as in ``compare``."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same."""

    what: str
    a: str
    b: str


def config_differences(a: Sequence[Run], b: Sequence[Run]) -> list[Difference]:
    """Returns the keys whose values differ, including keys that only one side has."""
    ours, theirs = _values(run.flat_config for run in a), _values(run.flat_config for run in b)
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if key not in _PLACES]
    return _differing(keys, ours, theirs)


def origin_differences(a: Sequence[Run], b: Sequence[Run]) -> list[Difference]:
    """Returns what differs of code, versions and machine."""
    return named_differences([origin(r.provenance) for r in a], [origin(r.provenance) for r in b])


def named_differences(
    a: Sequence[Mapping[str, str | None]], b: Sequence[Mapping[str, str | None]]
) -> list[Difference]:
    """Returns which of some named facts differ; a fact that no run recorded does not."""
    ours, theirs = _values(a), _values(b)
    return _differing(list(ours), ours, theirs)


def number_rows(a: Run, b: Run) -> list[tuple[str, Any, Any]]:
    """Returns title and values of the numbers that at least one of two runs has.

    Metrics are those of the whole run, as in ``compare``; the others are the last attempt's.
    """
    ours, theirs = _numbers(a), _numbers(b)
    rows = [(title, ours.get(key), theirs.get(key)) for key, title in _NUMBERS.items()]
    return [row for row in rows if row[1:] != (None, None)]


def origin(provenance: Any) -> dict[str, str | None]:
    """Returns code, versions and machine of a record's provenance as names and words."""
    cores = count(dig(provenance, "hardware", "cores"))
    memory = count(dig(provenance, "hardware", "memory"))
    return {
        "commit": text(dig(provenance, "git"), 60),
        "hires": text(dig(provenance, "hires"), 40),
        "torch": text(dig(provenance, "torch"), 40),
        "python": text(dig(provenance, "python"), 40),
        "host": text(dig(provenance, "host"), 60),
        "processor": text(dig(provenance, "hardware", "cpu"), 80),
        "cores": None if cores is None else str(cores),
        "memory": None if memory is None else size(memory),
    }


def _numbers(run: Run) -> Mapping[str, Any]:
    row, point = run_row(run), ComparedPoint([run])
    if point.attempts():
        for key, metric in _METRIC_OF.items():
            repeats = point.repeats(METRICS[metric])
            value = of_run(repeats) if repeats else math.nan
            row[key] = value if math.isfinite(value) else None
    return row


def _values(maps: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the different values of every key as text, in the order of the first of each."""
    texts: dict[str, dict[str, None]] = {}
    for values in maps:
        for key, value in values.items():
            word = "not recorded" if value is None else value_text(value)
            texts.setdefault(key, {}).setdefault(word)
    return {key: list(words) for key, words in texts.items()}


def _differing(
    keys: Sequence[str], a: Mapping[str, list[str]], b: Mapping[str, list[str]]
) -> list[Difference]:
    rows = [(key, a.get(key, []), b.get(key, [])) for key in keys]
    return [
        Difference(key, listed(x, _MAX_VALUES) or "-", listed(y, _MAX_VALUES) or "-")
        for key, x, y in rows
        if set(x) != set(y)
    ]
