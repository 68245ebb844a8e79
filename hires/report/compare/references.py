"""Reads and writes reference files: what runs should measure on this machine, with tolerances.

References:
    - {metric: throughput, value: 12.5, unit: img/s, tolerance: [-5%, +15%], cluster: node*,
       point: {model: resnet18, image: 64x64, layout: sp, batch: 4, optimizer.weight_decay: 0.5}}

A run fits if its host matches ``cluster``, all columns (of the frame ``runs``) and config keys of
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
from hires.report.compare.repeats import center
from hires.report.compare.verdicts import Tolerance, parse_tolerance
from hires.report.config_values import same_value, value_text
from hires.report.record import typed
from hires.report.runs import INPUTS, WITH_COLUMN, Run, defaults

OPTION = "--write-reference FILE"
_COLUMNS = ("model", "image", "layout", "precision", "task", "batch", "ranks")  # of a new point
_MEASUREMENT = ("steps", "measure.warmup", "measure.steps")  # they change the last loss only
_KEYS = {"metric", "value", "unit", "tolerance", "point"}


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
        row = {**run.flat_config, **run.point}
        equal = all(same_value(row.get(key), value) for key, value in self.point.items())
        others = _keys(run, self.metric).keys() - self.point.keys()
        return equal and not others and fnmatch.fnmatchcase(_host(run), self.cluster)


def read(path: Path) -> list[Reference]:
    """Returns the references of a file; ConfigError: it cannot be read, or an entry is wrong."""
    entry: Any = "references"
    try:
        values = yaml.safe_load(reading.read_named(path))
        entries = values.get(entry) if isinstance(values, dict) else None
        if not entries or not isinstance(entries, list):
            raise ValueError("there is no list of that name")
        return [_reference(entry := one) for one in entries]
    except (OSError, ValueError, RecursionError, ConfigError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path}, {entry}: {why}; `{OPTION}` writes such a file") from None


def _reference(entry: Any) -> Reference:
    if not isinstance(entry, dict) or not _KEYS <= entry.keys() <= {*_KEYS, "cluster"}:
        raise ValueError(f"an entry has the keys {', '.join(sorted(_KEYS))} and, if any, cluster")
    metric = METRICS.get(entry["metric"])
    if metric is None:
        raise ValueError(f"metric {entry['metric']!r} is none of {', '.join(METRICS)}")
    value = typed(float, entry["value"], f"{metric.name}, which is above 0,") * metric.base
    if entry["unit"] != metric.unit or value <= 0:
        raise ValueError(f"{metric.name} is above 0 and in {metric.unit}")
    ends = entry["tolerance"]
    tolerance = parse_tolerance(",".join(map(str, ends)) if isinstance(ends, list) else str(ends))
    point = typed(dict[str, Any], entry["point"], "point")
    texts = {key: value_text(part) for key, part in point.items()}
    return Reference(metric, value, tolerance, texts, str(entry.get("cluster", "*")))


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
            if (value := center(point.repeats(metric))) is not None:
                run = next(run for run in point.runs if run.repeats)
                row = {k: value_text(run.point[k]) for k in _COLUMNS if run.point.get(k)}
                keys, host = row | _keys(run, metric), cluster or _host(run) or "*"
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


def _host(run: Run) -> str:
    return run.provenance.host or ""


def _keys(run: Run, metric: Metric) -> dict[str, str]:
    """Returns the keys without a column that matter and differ from their defaults."""
    ignored = () if metric.name == "loss" else _MEASUREMENT
    keys = run.identity(*WITH_COLUMN, *INPUTS.values())
    return {k: v for k, v in keys.items() if k not in ignored and defaults().get(k) != v}
