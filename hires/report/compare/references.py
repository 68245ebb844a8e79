"""Reads and writes reference files: what runs should measure on this machine, with tolerances.

References:
    - metric: throughput          # throughput, step_time, memory or loss
      value: 12.5
      unit: img/s
      tolerance: [-5%, +15%]      # of the value: below, above
      cluster: node*              # host, as the run recorded it; unset: any
      point: {model: resnet18, image: 64x64, layout: sp, batch: 4}
      others: default             # keys that point leaves out; unset: any value

``point`` holds columns of a run (``rows.RUN_COLUMNS``) and keys of its config; a run fits if all of
them are equal, and with ``others: default`` if no other relevant key differs from its default.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
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

ENDINGS = (".yaml", ".yml")
OPTION = "--write-reference FILE"
_KEYS = {"metric", "value", "unit", "tolerance", "cluster", "point", "others"}
_COLUMNS = ("model", "image", "layout", "precision", "task", "batch", "ranks")  # of a new point
_MEASUREMENT = ("steps", "measure.warmup", "measure.steps")
"""Keys that change how often something is measured, and the last loss, but nothing else."""


@dataclass(frozen=True)
class Reference:
    """What one metric should be."""

    metric: Metric
    value: float  # in the base unit of the metric
    tolerance: Tolerance
    point: Mapping[str, str]  # columns and keys, with their values as text
    cluster: str = "*"
    strict: bool = False  # whether keys that ``point`` does not hold must have their defaults

    def fits(self, run: Run) -> bool:
        """Whether it is about a run."""
        host, row = run.provenance.get("host"), {**run.flat_config, **what(run)}
        others = _identity(run, self.metric, ()).keys() - self.point.keys() if self.strict else ()
        named = all(same_value(row.get(key), value) for key, value in self.point.items())
        return named and not others and fnmatch.fnmatchcase(str(host or ""), self.cluster)

    def to_dict(self) -> dict[str, Any]:
        """Returns what the file holds."""
        value = float(f"{self.metric.shown(self.value):.6g}")
        point = {key: yaml.safe_load(text) for key, text in self.point.items()}
        point = {
            k: v if value_text(v) == self.point[k] else self.point[k] for k, v in point.items()
        }
        facts = {"metric": self.metric.name, "value": value, "unit": self.metric.unit}
        facts |= {"tolerance": str(self.tolerance).split(","), "cluster": self.cluster}
        return {**facts, "point": point, **({"others": "default"} if self.strict else {})}


def is_reference(name: str) -> bool:
    """Whether a word of the command line names a file of references."""
    return name.endswith(ENDINGS) and not Path(name).is_dir()


def read(path: Path) -> list[Reference]:
    """Returns the references of a file; ConfigError: it cannot be read, or an entry is wrong."""
    try:
        values = yaml.safe_load(reading.read_named(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read: {why}") from None
    entries = values.get("references") if isinstance(values, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} holds no list `references:`; see {OPTION}")
    return [_reference(entry, f"{path}, entry {n}") for n, entry in enumerate(entries, start=1)]


def _reference(entry: Any, where: str) -> Reference:
    """Returns one entry of a file, which ``where`` names in errors."""
    if not isinstance(entry, dict) or not entry.keys() <= _KEYS:
        raise ConfigError(f"{where} is {entry}; its keys are {', '.join(sorted(_KEYS))}")
    metric, value = METRICS.get(str(entry.get("metric"))), number(entry.get("value"))
    point, others, ends = entry.get("point") or {}, entry.get("others"), entry.get("tolerance")
    if metric is None:
        raise ConfigError(
            f"{where}: metric {entry.get('metric')!r} is none of {', '.join(METRICS)}"
        )
    factor = metric.units.get(str(entry.get("unit", metric.unit)))
    if factor is None:
        raise ConfigError(f"{where}: {metric.name} is in {', '.join(metric.units)}")
    if value is None or value <= 0:
        raise ConfigError(f"{where} has value {entry.get('value')!r}; it must be above 0")
    if not isinstance(point, dict) or others not in (None, "default"):
        raise ConfigError(f"{where}: write `point: {{layout: sp, batch: 4}}`, `others: default`")
    words = ",".join(map(str, ends)) if isinstance(ends, list) else str(ends)
    try:
        tolerance = parse_tolerance(words)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    texts = {str(key): value_text(part) for key, part in point.items()}
    cluster = str(entry.get("cluster") or "*")
    return Reference(metric, value * factor, tolerance, texts, cluster, others is not None)


def best(references: Sequence[Reference], metric: Metric, run: Run) -> Reference | None:
    """Returns the first reference with the most keys of those that fit a run, if any fits."""
    fits = [r for r in references if r.metric is metric and r.fits(run)]
    return max(fits, key=lambda r: len(r.point), default=None)


def measured(
    runs: Sequence[Run], metrics: Sequence[Metric], tolerance: Tolerance, cluster: str | None = None
) -> list[Reference]:
    """Returns what the points of some runs measured, as what they should measure.

    Keys in which the runs differ are named even if they have their defaults. Without a ``cluster``
    the references are of the host that was measured.
    """
    configs = [run.identity(*WITH_COLUMN, *INPUTS.values()) for run in runs]
    every = {key for config in configs for key in config}
    keys = {key for key in every if len({config.get(key) for config in configs}) > 1}
    references = []
    for _, point in points(runs):
        for metric in metrics:
            value = middle(point.repeats(metric))
            if value is not None:
                run = point.attempts()[0][0]
                hosts = cluster or reading.text(run.provenance.get("host"), 200) or "*"
                identity = _identity(run, metric, keys)
                references.append(Reference(metric, value, tolerance, identity, hosts, strict=True))
    return references


def write(path: Path, references: Sequence[Reference], command: str) -> int:
    """Writes references into a file, with the command line in its first line.

    Those about other points and clusters stay. Returns how many references the file holds now.
    ConfigError: the file holds something else; RunError: it cannot be written.
    """
    held = [*(read(path) if path.exists() else []), *references]
    kept = {(r.metric.name, r.cluster, tuple(sorted(r.point.items()))): r for r in held}
    entries = [reference.to_dict() for reference in kept.values()]
    text = yaml.safe_dump({"references": entries}, sort_keys=False, default_flow_style=None)
    head = f"# Written by: {' '.join(command.splitlines())}\n"
    write_atomically(path, head + text, option=OPTION)
    return len(entries)


def _identity(run: Run, metric: Metric, keys: Collection[str]) -> dict[str, str]:
    """Returns the columns of a run, the given keys, and the keys that differ from the defaults."""
    ignored = () if metric.name == "loss" else _MEASUREMENT
    row = what(run)
    identity = {key: value_text(row[key]) for key in _COLUMNS if row.get(key) is not None}
    for key, value in run.identity(*WITH_COLUMN, *INPUTS.values()).items():
        if key in keys or (key not in ignored and defaults().get(key) != value):
            identity[key] = value
    return identity
