"""Compares runs with other runs or with references: all points, all metrics, all differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hires.core.errors import ConfigError
from hires.core.store.reading import text
from hires.core.units import size
from hires.report.compare.bootstrap import CONFIDENCE
from hires.report.compare.metrics import METRICS, Metric, per_image
from hires.report.compare.pairing import ComparedPoint, pair, points
from hires.report.compare.references import Reference, best
from hires.report.compare.verdicts import DECIDED, WORSE, PointVerdict, Settings, judge, overall
from hires.report.read.plain_values import count, dig, listed, value_text
from hires.report.read.repeats import median
from hires.report.read.rows import run_row
from hires.report.read.runs import Run

_MAX_NOTES = 5  # notes about unreadable files that are listed
_MAX_LABELS = 4  # points that a note names
_PLACES = ("campaign", "results")  # keys that say where a run is kept
_MAX_VALUES = 4  # values that are listed before the others are counted
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
    "top1": "accuracy",
    "state": "state",
}
"""Columns of a run that are shown beside another run's, with their titles."""
_ORIGIN = {
    "commit": ("git",),
    **{name: (name,) for name in ("hires", "torch", "python", "host")},
    "processor": ("hardware", "cpu"),
}
"""Where a provenance holds what is shown of it."""


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
    def verdicts(self) -> list[PointVerdict]:
        """Those on points, and those on all points together."""
        return [*self.results, *self.overall]

    @property
    def is_worse(self) -> bool:
        """Whether anything became worse."""
        return any(verdict.status == WORSE for verdict in self.verdicts)

    @property
    def is_decided(self) -> bool:
        """Whether anything is known to be better, worse or the same."""
        return any(verdict.status in DECIDED for verdict in self.verdicts)

    def add(self, metric: Metric, verdicts: list[PointVerdict]) -> None:
        """Adds the verdicts of one metric, and the one on all points together."""
        self.results += verdicts
        self.overall.append(overall(metric, verdicts, self.settings))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        settings = self.settings
        return {
            "a": self.names[0],
            "b": self.names[1],
            "regression": self.is_worse,
            "confidence": CONFIDENCE,
            "resamples": settings.resamples,
            "seed": settings.seed,
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
    read_a, read_b = ([run for run in side if run.config] for side in (a, b))
    pairs = pair(read_a, read_b)
    shared = [both for both in pairs if both[1].runs and both[2].runs]
    if not shared:
        config = run_differences(read_a, read_b)[0]
        keys = ", ".join(f"{d.what} ({d.a} in A, {d.b} in B)" for d in config)
        raise ConfigError(
            f"no run of {names[1]} is the same point as one of {names[0]}: they differ in "
            f"{keys or 'what their damaged config.yaml would say'}"
        )
    comparison = Comparison(names, settings)
    batches = [{point.runs[0].identity().get("batch") for point in both[1:]} for both in shared]
    if any(len(batch) > 1 for batch in batches):  # of all pairs, then: each side has one batch
        metrics = [per_image(metric) for metric in metrics]
        comparison.notes.append(
            "the sides have other batches: throughput and step time are per image, memory and loss "
            "are not comparable"
        )
    for metric in metrics:
        comparison.add(metric, [judge(label, metric, x, y, settings) for label, x, y in shared])
    comparison.config, comparison.origin = run_differences(read_a, read_b)
    only_a = [label for label, _, theirs in pairs if not theirs.runs]
    only_b = [label for label, ours, _ in pairs if not ours.runs]
    for side, labels in zip(names, (only_a, only_b), strict=True):
        if labels:
            comparison.notes.append(f"only in {side}: {listed(labels, _MAX_LABELS, '; ')}")
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
    every = list({r.metric.name: r.metric for r in references}.values())
    for metric in every if metrics is None else metrics:
        fits = [(*labelled, best(references, metric, labelled[1].runs[0])) for labelled in measured]
        without += [f"{metric.name} of {label}" for label, _, fit in fits if fit is None]
        verdicts = [
            judge(label, metric, fit.value, point, replace(settings, tolerance=fit.tolerance))
            for label, point, fit in fits
            if fit is not None
        ]
        if verdicts:
            comparison.add(metric, verdicts)
    if not comparison.results:
        raise ConfigError(
            f"no reference of {names[0]} fits a run of {names[1]}: cluster, point and metric must"
        )
    if without:
        comparison.notes.append(f"no reference for {listed(without, _MAX_LABELS, '; ')}")
    _add_notes(comparison, [point for _, point in measured], runs)
    return comparison


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


def _add_notes(
    comparison: Comparison, compared: Sequence[ComparedPoint], runs: Sequence[Run]
) -> None:
    """Notes which attempts and seeds were left out, and which files are damaged."""
    notes, results = comparison.notes, comparison.results
    left_out = sum(point.num_left_out() for point in compared)
    if left_out:
        notes.append(
            f"{left_out} complete attempts of another commit or machine than the latest left out"
        )
    for alone in dict.fromkeys(tuple(verdict.alone) for verdict in results if verdict.alone):
        seeds, them = ("seeds", "them") if len(alone) > 1 else ("seed", "it")
        labels = dict.fromkeys(one.point for one in results if tuple(one.alone) == alone)
        notes.append(
            f"{seeds} {', '.join(alone)} left out, because only one side has {them}: "
            f"{listed(list(labels), _MAX_LABELS, '; ')}"
        )
    damaged = list(dict.fromkeys(f"{n.where}: {n.text}" for run in runs for n in run.notes))
    left = len(damaged) - _MAX_NOTES
    notes += damaged[:_MAX_NOTES] + ([f"and {left} more"] if left > 0 else [])


def _word(value: Any) -> str:
    return "not recorded" if value is None else value_text(value)
