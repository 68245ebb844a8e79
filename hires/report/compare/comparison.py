"""Compares runs with other runs or with references: all points, all metrics, all differences.

A reference says what runs should measure on this machine, with a tolerance::

    # the list `references` of a YAML file
    - {metric: throughput, value: 12.5, unit: img/s, tolerance: [-5%, +15%], cluster: node*,
       point: {model: resnet18, image: 64x64, layout: sp, batch: 4, optimizer.weight_decay: 0.5}}

A run fits if its host matches ``cluster``, all columns (of the frame ``runs``) and config keys of
``point`` are equal, and no other key that matters differs from its default.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hires.core.config.fields import build
from hires.core.errors import ConfigError
from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.core.units import listed, size
from hires.report.columns import value_text
from hires.report.compare.bootstrap import CONFIDENCE, center
from hires.report.compare.verdicts import (
    METRICS,
    OF_A_STEP,
    UNDECIDED,
    UNKNOWN,
    WORSE,
    ComparedPoint,
    Metric,
    PointVerdict,
    Settings,
    Tolerance,
    judge,
    overall,
    pair,
    parse_tolerance,
    points,
)
from hires.report.record import RecordedProvenance
from hires.report.runs import INPUTS, WITH_COLUMN, Run, defaults, size_columns

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
            raise ConfigError(f"metric {self.metric!r} is none of {', '.join(METRICS)}")
        if self.unit != METRICS[self.metric].unit or not 0 < self.value < math.inf:
            raise ConfigError(
                f"value={self.value}, unit={self.unit}: {self.metric} is above 0 and in "
                f"{METRICS[self.metric].unit}"
            )
        self.accepted()

    def accepted(self) -> Tolerance:
        """Returns how far a number may be off."""
        return parse_tolerance(",".join(self.tolerance))

    def fits(self, run: Run) -> bool:
        """Whether it is about a run."""
        row = {**run.flat_config, **run.point}
        point = self.point | size_columns(self.point.get("image"))  # 64 and [64,64] are 64x64
        equal = all(value_text(row.get(key)) == value_text(v) for key, v in point.items())
        others = _keys(run, METRICS[self.metric]).keys() - self.point.keys()
        return equal and not others and fnmatch.fnmatchcase(_host(run), self.cluster)


def read_references(path: Path) -> list[Reference]:
    """Returns the references of a file; ConfigError: it cannot be read, or an entry is wrong."""
    try:
        values = yaml.safe_load(reading.read_named(path))
        entries = values.get("references") if isinstance(values, dict) else None
        if not entries or not isinstance(entries, list):
            raise ValueError("it holds no references, which are a list named `references`")
        return [build(Reference, one, f"reference {n}.") for n, one in enumerate(entries, start=1)]
    except (OSError, ValueError, RecursionError, ConfigError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path}: {why}; `{OPTION}` writes such a file") from None


def measured_references(
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


def write_references(path: Path, references: Sequence[Reference], command: str) -> int:
    """Writes references into a file beside those of other points; returns how many it holds now.

    ConfigError: the file holds something else; RunError: it cannot be written.
    """
    every = [*(read_references(path) if path.exists() else []), *references]
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


_MOST = 5  # points, keys or notes that are listed before the others are counted
_PLACES = ("campaign", "results")  # keys that say where a run is kept


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same."""

    what: str
    a: str
    b: str


@dataclass
class Comparison:
    """All results of a comparison."""

    names: tuple[str, str]
    settings: Settings
    results: list[PointVerdict] = field(default_factory=list)  # one for every point and metric
    overall: list[PointVerdict] = field(default_factory=list)  # one for every metric
    config: list[Difference] = field(default_factory=list)
    origin: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_worse(self) -> bool:
        """Whether anything became worse."""
        return any(one.status == WORSE for one in self.overall)

    @property
    def is_decided(self) -> bool:
        """Whether anything is known to be better, worse or the same."""
        statuses = {one.status for one in (*self.results, *self.overall)}
        return bool(statuses - {UNKNOWN, UNDECIDED})

    def add(self, metric: Metric, verdicts: list[PointVerdict]) -> None:
        """Adds the verdicts of one metric, and the one on all points together."""
        self.results += verdicts
        self.overall.append(overall(metric, verdicts, self.settings))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            **dict(zip("ab", self.names, strict=True)),
            "regression": self.is_worse,
            "confidence": CONFIDENCE,
            "resamples": self.settings.resamples,
            "seed": self.settings.seed,
            "overall": [verdict.to_dict() for verdict in self.overall],
            "points": [verdict.to_dict() for verdict in self.results],
            "config": [vars(difference) for difference in self.config],
            "origin": [vars(difference) for difference in self.origin],
            "notes": self.notes,
        }


def compare_runs(
    names: tuple[str, str], a: Sequence[Run], b: Sequence[Run],
    metrics: Sequence[Metric], settings: Settings,
) -> Comparison:  # fmt: skip
    """Returns how the runs of B compare with those of A; ConfigError: they share no point."""
    sides = [[run for run in side if run.config] for side in (a, b)]
    for name, runs in zip(names, sides, strict=True):
        if not runs:
            raise ConfigError(f"no run of {name} has a config.yaml that can be read")
    pairs = pair(*sides)
    machine = named_differences(*([origin(run.provenance) for run in side] for side in sides))
    config = named_differences(*([run.flat_config for run in side] for side in sides))
    config = [one for one in config if one.what not in _PLACES]
    shared = [both for both in pairs if both[1].runs and both[2].runs]
    if not shared:
        keys = [f"{d.what} ({d.a} in A, {d.b} in B)" for d in config]
        raise ConfigError(
            f"no run of {names[1]} is the same point as one of {names[0]}: they differ in "
            f"{listed(keys, _MOST)}"
        )
    batches = [{point.runs[0].identity().get("batch") for point in both[1:]} for both in shared]
    of_a_step = [metric.name for metric in metrics if metric.name in OF_A_STEP]
    if of_a_step and any(len(batch) > 1 for batch in batches):
        raise ConfigError(
            f"the sides have other batches, and {listed(of_a_step)} is of a step; compare "
            f"throughput, or sides with the same batch"
        )
    comparison = Comparison(names, settings, config=config, origin=machine)
    for metric in metrics:
        comparison.add(metric, [judge(label, metric, x, y, settings) for label, x, y in shared])
    for name, other in zip(names, (1, 0), strict=True):
        alone = [label for label, *both in pairs if not both[other].runs]
        comparison.notes += [f"only in {name}: {listed(alone, _MOST, '; ')}"] * bool(alone)
    _add_notes(comparison, [point for _, *both in shared for point in both], [*a, *b])
    return comparison


def compare_references(
    names: tuple[str, str], references: Sequence[Reference], runs: Sequence[Run],
    metrics: Sequence[Metric] | None, settings: Settings,
) -> Comparison:  # fmt: skip
    """Returns how runs compare with references, each with its own tolerance.

    ``names`` are of the references and of the runs; without ``metrics`` all are compared that the
    references have. ConfigError: no reference fits any run.
    """
    comparison = Comparison(names, settings)
    measured = points(runs)
    without: list[str] = []
    every = [METRICS[name] for name in dict.fromkeys(one.metric for one in references)]
    for metric in every if metrics is None else metrics:
        verdicts = []
        for label, point in measured:
            fits = [r for r in references if r.metric == metric.name and r.fits(point.runs[0])]
            if not fits:
                without.append(f"{metric.name} of {label}")
                continue
            best = max(fits, key=lambda r: len(r.point))  # of several the first with the most keys
            tolerant = replace(settings, tolerance=best.accepted())
            verdicts.append(judge(label, metric, best.value * metric.base, point, tolerant))
        if verdicts:
            comparison.add(metric, verdicts)
    if not comparison.results:
        raise ConfigError(
            f"no reference of {names[0]} fits a run of {names[1]}: cluster, point and metric must"
        )
    if without:
        comparison.notes.append(f"no reference for {listed(without, _MOST, '; ')}")
    _add_notes(comparison, [point for _, point in measured], runs)
    return comparison


def named_differences(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> list[Difference]:
    """Returns the keys whose sets of values differ, with these values as text."""
    differences = []
    for key in dict.fromkeys(key for values in [*a, *b] for key in values):
        sides = [
            dict.fromkeys(
                "not recorded" if v[key] is None else value_text(v[key]) for v in side if key in v
            )
            for side in (a, b)
        ]
        if sides[0].keys() != sides[1].keys():
            words = [listed([*side], _MOST) or "-" for side in sides]
            differences.append(Difference(key, *words))
    return differences


def origin(provenance: RecordedProvenance) -> dict[str, str | None]:
    """Returns code, versions and machine of a record as names and words."""
    machine = provenance.hardware
    return {
        "commit": provenance.git,
        **{name: getattr(provenance, name) for name in ("hires", "torch", "python", "host")},
        "processor": machine.cpu,
        "cores": None if machine.cores is None else str(machine.cores),
        "memory": None if machine.memory is None else size(machine.memory),
    }


def _add_notes(
    comparison: Comparison, compared: Sequence[ComparedPoint], runs: Sequence[Run]
) -> None:
    """Notes which attempts and seeds were left out, and which files are damaged."""
    left_out = sum(point.num_left_out() for point in compared)
    if left_out:
        comparison.notes.append(
            f"{left_out} complete attempts of another commit or machine than the latest left out"
        )
    if alone := dict.fromkeys(seed for one in comparison.results for seed in one.unpaired_seeds):
        seeds = listed([*alone], _MOST)
        comparison.notes.append(f"seeds left out of points of which one side has them: {seeds}")
    damaged = dict.fromkeys(f"{note.where}: {note.text}" for run in runs for note in run.notes)
    comparison.notes += [listed([*damaged], _MOST, "; ")] if damaged else []
