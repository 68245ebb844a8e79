"""Reads and writes reference files: what runs should measure on this machine, with tolerances.

References:
    - {metric: throughput, value: 12.5, unit: img/s, tolerance: [-5%, +15%], cluster: node*,
       point: {model: resnet18, image: 64x64, layout: sp, batch: 4, optimizer.weight_decay: 0.5}}

A run fits if its host matches ``cluster``, all columns (``rows.RUN_COLUMNS``) and config keys of
``point`` are equal, and no other key that matters differs from its default.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hires.core.errors import ConfigError
from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.report.compare.metrics import METRICS, Metric
from hires.report.compare.pairing import points
from hires.report.compare.verdicts import Tolerance, parse_tolerance
from hires.report.read.measured_points import WITH_COLUMN, defaults
from hires.report.read.plain_values import number, same_value, value_text
from hires.report.read.repeats import middle
from hires.report.read.rows import what
from hires.report.read.runs import INPUTS, Run

OPTION = "--write-reference FILE"
_COLUMNS = ("model", "image", "layout", "precision", "task", "batch", "ranks")  # of a new point
_MEASUREMENT = ("steps", "measure.warmup", "measure.steps")  # they change the last loss only


@dataclass(frozen=True)
class Reference:
    """What one metric should be, in its base unit, and of which points, whose values are texts."""

    metric: Metric
    value: float
    tolerance: Tolerance
    point: Mapping[str, str]
    cluster: str = "*"

    def fits(self, run: Run) -> bool:
        """Whether it is about a run."""
        host, row = str(run.provenance.get("host") or ""), {**run.flat_config, **what(run)}
        equal = all(same_value(row.get(key), value) for key, value in self.point.items())
        others = _keys(run, self.metric).keys() - self.point.keys()
        return equal and not others and fnmatch.fnmatchcase(host, self.cluster)


def read(path: Path) -> list[Reference]:
    """Returns the references of a file; ConfigError: it cannot be read, or an entry is wrong."""
    entry: Any = "references"
    try:
        values = yaml.safe_load(reading.read_named(path))
        entries = values.get(entry) if isinstance(values, dict) else None
        if not entries or not isinstance(entries, list):
            raise ValueError("there is no list of that name")
        return [_reference(**_with_keys(entry := one)) for one in entries]
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
            ConfigError, yaml.YAMLError) as error:  # fmt: skip
        why = " ".join(str(error).split())
        raise ConfigError(f"{path}, {entry}: {why}; `{OPTION}` writes such a file") from None


def _with_keys(entry: Any) -> dict[str, Any]:
    every = ("metric", "value", "unit", "tolerance", "point", "cluster")
    if not isinstance(entry, dict) or not {*every[:-1]} <= entry.keys() <= {*every}:
        raise ValueError(f"an entry has the keys {', '.join(every[:-1])} and, if any, {every[-1]}")
    return entry


def _reference(
    metric: str, value: Any, unit: str, tolerance: Any, point: Mapping[str, Any], cluster: str = "*"
) -> Reference:
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r} is none of {', '.join(METRICS)}")
    base = (number(value) or 0) * METRICS[metric].base
    if unit != METRICS[metric].unit or base <= 0:
        raise ValueError(f"{metric} is above 0 and in {METRICS[metric].unit}")
    ends = parse_tolerance(",".join(tolerance) if isinstance(tolerance, list) else str(tolerance))
    texts = {str(key): value_text(part) for key, part in point.items()}
    return Reference(METRICS[metric], base, ends, texts, str(cluster))


def best(references: Sequence[Reference], metric: Metric, run: Run) -> Reference | None:
    """Returns the first reference with the most keys of those that fit a run, if any fits."""
    fits = [r for r in references if r.metric is metric and r.fits(run)]
    return max(fits, key=lambda r: len(r.point), default=None)


def measured(
    runs: Sequence[Run], metrics: Sequence[Metric], tolerance: Tolerance, cluster: str | None = None
) -> list[Reference]:
    """Returns what points measured, as what they should measure on a cluster or their host."""
    references = []
    for _, point in points(runs):
        for metric in metrics:
            if (value := middle(point.repeats(metric))) is not None:
                run = point.attempts()[0][0]
                host = cluster or reading.text(run.provenance.get("host"), 200) or "*"
                row = {k: what(run)[k] for k in _COLUMNS if what(run).get(k) is not None}
                keys = {k: value_text(v) for k, v in row.items()} | _keys(run, metric)
                references.append(Reference(metric, value, tolerance, keys, host))
    return references


def write(path: Path, references: Sequence[Reference], command: str) -> int:
    """Writes references into a file beside those of other points; returns how many it holds now.

    ConfigError: the file holds something else; RunError: it cannot be written.
    """
    every = [*(read(path) if path.exists() else []), *references]
    entries = {
        (one.metric.name, one.cluster, tuple(sorted(one.point.items()))): {
            "metric": one.metric.name,
            "value": float(f"{one.metric.shown(one.value):.6g}"),
            "unit": one.metric.unit,
            "tolerance": str(one.tolerance).split(","),
            "cluster": one.cluster,
            "point": dict(one.point),
        }
        for one in every
    }
    held = {"references": [*entries.values()]}
    text = yaml.safe_dump(held, sort_keys=False, default_flow_style=None)
    head = f"# Written by: {' '.join(command.splitlines())}\n"
    write_atomically(path, head + text, option=OPTION)
    return len(entries)


def _keys(run: Run, metric: Metric) -> dict[str, str]:
    """Returns the keys without a column that matter and differ from their defaults."""
    ignored = () if metric.name == "loss" else _MEASUREMENT
    keys = run.identity(*WITH_COLUMN, *INPUTS.values())
    return {k: v for k, v in keys.items() if k not in ignored and defaults().get(k) != v}
