"""What differs between two sets of runs: config, code, versions and machine?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hires.core.store.reading import text
from hires.core.units import size
from hires.report.compare.metrics import METRICS
from hires.report.compare.pairing import Point
from hires.report.compare.repeated_points import of_run
from hires.report.load.plain_values import count, dig, spoken
from hires.report.load.rows import run_row
from hires.report.load.runs import Run

_PLACES = ("campaign", "results")
"""Keys that say where a run is kept."""
_MOST = 4
"""Values that are listed before the rest is counted."""
NUMBERS = (
    ("img_per_s_median", "throughput [img/s]"),
    ("step_s_median", "step time [s]"),
    ("samples", "steps that count"),
    ("peak_bytes_max", "fullest rank [bytes]"),
    ("predicted_bytes_max", "fullest rank predicted [bytes]"),
    ("messages_per_step", "messages a step"),
    ("bytes_per_step", "sent a step [bytes]"),
    ("loss_first", "first loss"),
    ("loss_last", "last loss"),
    ("state", "state"),
)
"""Columns of a run that are worth a look beside another's."""
_OF_RUN = {
    "img_per_s_median": "throughput",
    "step_s_median": "step_time",
    "peak_bytes_max": "memory",
    "loss_last": "loss",
}
"""Columns that ``compare`` takes over all complete attempts, and so does this."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same."""

    what: str
    a: str
    b: str


def config_differences(a: Sequence[Run], b: Sequence[Run]) -> list[Difference]:
    """Returns the keys whose values differ, also of keys that only one side has."""
    ours, theirs = _values(run.flat_config for run in a), _values(run.flat_config for run in b)
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if key not in _PLACES]
    return _differing((key, ours.get(key, {}), theirs.get(key, {})) for key in keys)


def origin_differences(a: Sequence[Run], b: Sequence[Run]) -> list[Difference]:
    """Returns what differs of code, versions and machine."""
    return named_differences([origin(r.provenance) for r in a], [origin(r.provenance) for r in b])


def named_differences(
    a: Sequence[Mapping[str, str | None]], b: Sequence[Mapping[str, str | None]]
) -> list[Difference]:
    """Returns which of some named facts differ; what is known of nobody does not."""
    ours, theirs = _values(a), _values(b)
    return _differing((name, ours.get(name, {}), theirs.get(name, {})) for name in ours)


def number_rows(a: Run, b: Run) -> list[tuple[str, Any, Any]]:
    """Returns the numbers of two runs that at least one of them knows.

    Those that can be compared are the run's (``bootstrap.of_run``); the rest is the last attempt's.
    """
    ours, theirs = _numbers(a), _numbers(b)
    rows = [(title, ours.get(key), theirs.get(key)) for key, title in NUMBERS]
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
    """Returns the row of a run, with the medians over its complete attempts in it."""
    found = run_row(run)
    point = Point([run])
    for key, metric in _OF_RUN.items():
        repeats = point.repeats(METRICS[metric])
        if point.attempts():
            value = of_run(repeats) if repeats else math.nan
            found[key] = value if math.isfinite(value) else None
    return found


def _values(maps: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, None]]:
    """Returns all values of every key, in words, in the order of the first of each."""
    found: dict[str, dict[str, None]] = {}
    for values in maps:
        for key, value in values.items():
            said = "not recorded" if value is None else spoken(value)
            found.setdefault(key, {}).setdefault(said)
    return found


def _differing(
    rows: Iterable[tuple[str, Mapping[str, None], Mapping[str, None]]],
) -> list[Difference]:
    """Returns the rows whose values are not the same on both sides."""
    return [Difference(what, _said(a), _said(b)) for what, a, b in rows if set(a) != set(b)]


def _said(values: Mapping[str, None]) -> str:
    """Returns values in words, of many the first ones."""
    known = list(values)
    if not known:
        return "-"
    left = len(known) - _MOST
    return ", ".join(known[:_MOST]) + (f" and {left} more" if left > 0 else "")
