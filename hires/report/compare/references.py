"""What should a run come to on this machine? A YAML file with values and tolerances says so.

References:
    - metric: throughput          # throughput, step_time, memory or loss
      value: 12.5
      unit: img/s
      tolerance: [-5%, +15%]      # of the value: below, above
      cluster: node*              # host, as the run recorded it; unset: any
      point: {model: resnet18, image: 64x64, layout: sp, batch: 4}
      others: default             # keys that point leaves out; unset: any value

``point`` holds columns of a run (``rows.RUN_COLUMNS``) and keys of its config; a run fits if all of
them are equal, and with ``others: default`` if no other key that matters differs from its default.
Of several references that fit a run the one that says most of it counts, and of those the first.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hires.core.errors import ConfigError
from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.core.store.naming import COSMETIC
from hires.report.compare.metrics import METRICS, Metric
from hires.report.compare.pairing import SEED, Point
from hires.report.compare.verdicts import Tolerance, parse_tolerance
from hires.report.load.measured_points import defaults
from hires.report.load.plain_values import alike, number, spoken
from hires.report.load.rows import Row, what
from hires.report.load.runs import Run

ENDINGS = (".yaml", ".yml")
OPTION = "--write-reference FILE"
_KEYS = ("metric", "value", "unit", "tolerance", "cluster", "point", "others")
_DEFAULT = "default"
_COLUMNS = ("model", "image", "layout", "precision", "task", "batch", "ranks")
"""Columns that name a point in a file that is written."""
_TOLD = ("image", "batch", "task.name", "parallel.name", "precision.name", "model.name")
"""Keys that the columns tell already."""
_NO_MATTER = ("steps", "measure.warmup", "measure.steps")
"""Keys that change how often something is measured, and what the last loss is."""


@dataclass(frozen=True)
class Reference:
    """What one metric should be."""

    metric: Metric
    value: float
    """In the base unit of the metric."""
    tolerance: Tolerance
    point: Mapping[str, str]
    """Columns and keys, with their values in words."""
    cluster: str = "*"
    strict: bool = False
    """Whether keys that ``point`` does not hold must have their defaults."""

    def fits(self, run: Run) -> bool:
        """Whether it is about a run."""
        return next(self._against(run), None) is None

    def misfits(self, run: Run) -> list[str]:
        """Returns in words why it is not about a run, one for each thing that differs."""
        return list(self._against(run))

    def _against(self, run: Run) -> Iterator[str]:
        """Yields in words what differs from a run."""
        host = reading.text(run.provenance.get("host"), 200) or ""
        if not fnmatch.fnmatchcase(host, self.cluster):
            yield f"cluster {self.cluster} is not {host or 'known'}"
        known: Row = {**run.flat_config, **what(run)}
        for key, said in self.point.items():
            if not alike(known.get(key), said):
                yield f"{key} {said} is not {spoken(known.get(key))}"
        for key, said in _named(run, self.metric, ()).items() if self.strict else ():
            if key not in self.point:
                yield f"{key} is {said}, not its default"

    def to_dict(self) -> dict[str, Any]:
        """Returns what the file holds."""
        metric, tolerance = self.metric, self.tolerance
        value = metric.shown(self.value)
        return {
            "metric": metric.name,
            "value": float(f"{value:.6g}"),
            "unit": metric.unit,
            "tolerance": [f"{100 * tolerance.low:+g}%", f"{100 * tolerance.high:+g}%"],
            "cluster": self.cluster,
            "point": {key: _typed(said) for key, said in self.point.items()},
            **({"others": _DEFAULT} if self.strict else {}),
        }


def is_reference(name: str) -> bool:
    """Whether a word on the command line names a file of references."""
    return name.endswith(ENDINGS) and not Path(name).is_dir()


def read(path: Path) -> list[Reference]:
    """Returns the references of a file.

    Raises:
        ConfigError: it cannot be read, or an entry makes no sense; the entry is named.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read: {why}") from None
    entries = values.get("references") if isinstance(values, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} holds no list `references:`; see {OPTION}")
    return [_reference(entry, f"{path}, entry {n}") for n, entry in enumerate(entries, start=1)]


def apart(runs: Sequence[Run]) -> set[str]:
    """Returns the keys in which runs differ, of those that say what a run is."""
    held = [{k: spoken(v) for k, v in run.flat_config.items() if _counts(k)} for run in runs]
    every = {key for config in held for key in config}
    return {key for key in every if len({config.get(key) for config in held}) > 1}


def best(references: Sequence[Reference], metric: Metric, run: Run) -> Reference | None:
    """Returns the reference that fits a run and says most of it; None if none fits."""
    fits = [r for r in references if r.metric is metric and r.fits(run)]
    return max(fits, key=lambda r: len(r.point), default=None)


def from_point(
    point: Point, metric: Metric, value: float, tolerance: Tolerance, keys: Collection[str] = ()
) -> Reference:
    """Returns what a point came to as what it should come to.

    Args:
        point: complete runs of one config.
        metric: which number.
        value: of the point, in the base unit.
        tolerance: how far others may be off.
        keys: what tells the point from others, and is written even if it is the default.
    """
    run = point.attempts()[0][0]
    host = reading.text(run.provenance.get("host"), 200) or "*"
    return Reference(metric, value, tolerance, _named(run, metric, keys), host, strict=True)


def write(path: Path, references: Sequence[Reference], made_by: str) -> int:
    """Writes references into a file; those that it held about other points and clusters stay.

    Args:
        path: the file; it is made if it is not there.
        references: what to write.
        made_by: the command line.

    Returns:
        How many references the file holds now.

    Raises:
        ConfigError: the file holds something else.
        RunError: it cannot be written.
    """
    kept = {_about(r): r for r in read(path)} if path.exists() else {}
    kept.update({_about(reference): reference for reference in references})
    entries = [reference.to_dict() for reference in kept.values()]
    text = yaml.safe_dump({"references": entries}, sort_keys=False, default_flow_style=None)
    head = f"# Written by: {' '.join(made_by.splitlines())}\n"
    write_atomically(path, head + text, option=OPTION)
    return len(entries)


def _about(reference: Reference) -> tuple[Any, ...]:
    """Returns what two references share that cannot both be true."""
    point = tuple(sorted(reference.point.items()))
    return reference.metric.name, reference.cluster, point


def _named(run: Run, metric: Metric, keys: Collection[str]) -> dict[str, str]:
    """Returns columns and keys that name a run: some keys, and what differs from the defaults."""
    told = () if metric.name == "loss" else _NO_MATTER
    row = what(run)
    named = {key: spoken(row[key]) for key in _COLUMNS if row.get(key) is not None}
    for key, value in run.flat_config.items():
        unusual = key not in told and defaults().get(key) != spoken(value)
        if _counts(key) and (key in keys or unusual):
            named[key] = spoken(value)
    return named


def _counts(key: str) -> bool:
    """Whether a key says what a run is, and no column says so already."""
    return key not in (*COSMETIC, *_TOLD, SEED) and not key.startswith("checkpoint.")


def _reference(entry: Any, where: str) -> Reference:
    """Returns one entry of a file."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} holds no keys; it needs metric, value, unit and tolerance")
    unknown = [str(key) for key in entry if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{where} has the unknown key {unknown[0]!r}; use {', '.join(_KEYS)}")
    metric = METRICS.get(str(entry.get("metric")))
    if metric is None:
        names = ", ".join(METRICS)
        raise ConfigError(f"{where} has metric {entry.get('metric')!r}; choose one of {names}")
    unit = str(entry.get("unit", metric.unit))
    if unit not in metric.units:
        names = ", ".join(metric.units)
        raise ConfigError(f"{where} has unit {unit!r}; {metric.name} is in {names}")
    value = number(entry.get("value"))
    if value is None or value <= 0:
        raise ConfigError(f"{where} has value {entry.get('value')!r}; it must be above 0")
    point = entry.get("point") or {}
    if not isinstance(point, dict):
        raise ConfigError(f"{where} has point {point!r}; write it as {{layout: sp, batch: 4}}")
    filters = {str(key): spoken(said) for key, said in point.items()}
    tolerance = _tolerance(entry.get("tolerance"), where)
    cluster = str(entry.get("cluster") or "*")
    others = entry.get("others")
    if others not in (None, _DEFAULT):
        raise ConfigError(f"{where} has others {others!r}; it is {_DEFAULT}, or left out")
    strict = others == _DEFAULT
    return Reference(metric, value * metric.units[unit], tolerance, filters, cluster, strict)


def _tolerance(said: Any, where: str) -> Tolerance:
    """Returns a tolerance, a list of two or one for both ways."""
    text = ",".join(str(part) for part in said) if isinstance(said, list) else str(said)
    try:
        return parse_tolerance(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _typed(said: str) -> Any:
    """Returns a value as one would type it in YAML: a number without quotes."""
    try:
        value = yaml.safe_load(said)
    except yaml.YAMLError:
        return said
    return value if spoken(value) == said else said
