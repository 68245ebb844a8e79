"""Reads and writes reference files: what runs should measure on this machine, with tolerances.

References:
    - {metric: throughput, value: 12.5, unit: img/s, tolerance: [-5%, +15%], cluster: node*,
       point: {model: resnet18, image: 64x64, layout: sp, batch: 4, optimizer.weight_decay: 0.5}}

A run fits if its host matches ``cluster``, all columns (of the frame ``runs``) and config keys of
``point`` are equal, and no other key that matters differs from its default.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hires.core.errors import ConfigError
from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.report.columns import same_value, value_text
from hires.report.compare.bootstrap import center
from hires.report.compare.metrics import METRICS, Metric, points
from hires.report.compare.verdicts import Tolerance, parse_tolerance
from hires.report.record import typed
from hires.report.runs import INPUTS, WITH_COLUMN, Run, defaults

OPTION = "--write-reference FILE"
_COLUMNS = ("model", "image", "layout", "precision", "task", "batch", "ranks")  # of a new point
_MEASUREMENT = ("steps", "measure.warmup", "measure.steps")  # they change the last loss only


@dataclass(frozen=True)
class Reference:
    """What one metric should be, and of which points."""

    metric: str
    value: float
    unit: str
    tolerance: list[str]
    point: dict[str, Any]
    cluster: str = "*"

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric {self.metric!r} is none of {', '.join(METRICS)}")
        if self.unit != METRICS[self.metric].unit or self.value <= 0:
            raise ValueError(f"{self.metric} is above 0 and in {METRICS[self.metric].unit}")
        self.accepted()

    def accepted(self) -> Tolerance:
        """Returns how far a number may be off."""
        return parse_tolerance(",".join(self.tolerance))

    def fits(self, run: Run) -> bool:
        """Whether it is about a run."""
        row = {**run.flat_config, **run.point}
        equal = all(same_value(row.get(key), value_text(v)) for key, v in self.point.items())
        others = _keys(run, METRICS[self.metric]).keys() - self.point.keys()
        return equal and not others and fnmatch.fnmatchcase(_host(run), self.cluster)


def read(path: Path) -> list[Reference]:
    """Returns the references of a file; ConfigError: it cannot be read, or an entry is wrong."""
    try:
        values = yaml.safe_load(reading.read_named(path))
        entries: list[Reference] = typed(dict[str, list[Reference]], values)["references"]
        if not entries:
            raise ValueError("it holds no references")
        return entries
    except (OSError, ValueError, LookupError, RecursionError, ConfigError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path}: {why}; `{OPTION}` writes such a file") from None


def best(references: Sequence[Reference], metric: Metric, run: Run) -> Reference | None:
    """Returns the first reference with the most keys of those that fit a run, if any fits."""
    fits = [r for r in references if r.metric == metric.name and r.fits(run)]
    return max(fits, key=lambda r: len(r.point), default=None)


def measured(
    runs: Sequence[Run], metrics: Sequence[Metric], tolerance: Tolerance, cluster: str | None = None
) -> list[Reference]:
    """Returns what points measured, as what they should measure on a cluster or their host."""
    references = []
    for _, point in points(runs):
        for metric in metrics:
            if (value := metric.shown(center(point.repeats(metric)))) is not None:
                run = next(run for run in point.runs if run.repeats)
                row = {k: value_text(run.point[k]) for k in _COLUMNS if run.point.get(k)}
                keys, host = row | _keys(run, metric), cluster or _host(run) or "*"
                words = metric.name, float(f"{value:.6g}"), metric.unit, str(tolerance).split(",")
                references.append(Reference(*words, keys, host))
    return references


def write(path: Path, references: Sequence[Reference], command: str) -> int:
    """Writes references into a file beside those of other points; returns how many it holds now.

    ConfigError: the file holds something else; RunError: it cannot be written.
    """
    every = [*(read(path) if path.exists() else []), *references]
    entries = {(r.metric, r.cluster, *sorted(map(str, r.point.items()))): vars(r) for r in every}
    text = yaml.safe_dump(
        {"references": [*entries.values()]}, sort_keys=False, default_flow_style=None
    )
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
