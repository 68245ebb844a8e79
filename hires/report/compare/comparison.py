"""Compares runs with other runs or with references: all points, all metrics, all differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hires.core.errors import ConfigError
from hires.core.store.files import write_atomically
from hires.core.store.reading import text
from hires.report.compare.differences import Difference, config_differences, origin_differences
from hires.report.compare.metrics import Metric
from hires.report.compare.pairing import ComparedPoint, pair, points
from hires.report.compare.references import Reference, best
from hires.report.compare.verdicts import (
    DECIDED,
    UNDECIDED,
    UNKNOWN,
    WORSE,
    PointVerdict,
    Settings,
    judge,
    overall,
)
from hires.report.load.plain_values import dicts, listed
from hires.report.load.runs import Run
from hires.report.templates import rendered

_FEW = 3
"""Repeats from which on their spread is known at least roughly."""
_MAX_NOTES = 5
"""Notes about unreadable files that are listed."""
_MAX_LABELS = 4
"""Points that a note names."""
_MAX_MISFITS = 300
"""Characters of the differences between a run and a reference."""
_MANY = 20
"""Points from which on some differ by chance alone."""
_MAX_XML_TEXT = 100_000
"""Characters; no text of a comparison is as long."""


@dataclass
class Comparison:
    """All results of a comparison."""

    names: tuple[str, str]
    settings: Settings
    results: list[PointVerdict] = field(default_factory=list)
    """One for every point and metric."""
    overall: list[PointVerdict] = field(default_factory=list)
    """One for every metric."""
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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        settings = self.settings
        return {
            "a": self.names[0],
            "b": self.names[1],
            "regression": self.is_worse,
            "confidence": settings.confidence,
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
    """Returns how the runs of B compare with those of A.

    Raises:
        ConfigError: they share no point.
    """
    pairing = pair(a, b)
    if not pairing.points:
        raise ConfigError(
            f"{names[0]} and {names[1]} share no point: their configs differ in keys that have "
            f"several values on a side; name runs or campaigns that differ in one thing"
        )
    comparison = Comparison(names, settings)
    for metric in metrics:
        verdicts = [judge(label, metric, old, new, settings) for label, old, new in pairing.points]
        comparison.results += verdicts
        comparison.overall.append(overall(metric, verdicts, settings))
    comparison.config = config_differences(a, b)
    comparison.origin = origin_differences(a, b)
    for side, labels in zip(names, (pairing.only_a, pairing.only_b), strict=True):
        if labels:
            comparison.notes.append(f"only in {side}: {listed(labels, _MAX_LABELS, '; ')}")
    compared = [point for _, *both in pairing.points for point in both]
    comparison.notes += [
        *_about_attempts(comparison, compared),
        *_about_repeats(comparison),
        *_about_files([*a, *b]),
    ]
    return comparison


def compare_references(
    names: tuple[str, str], references: Sequence[Reference], runs: Sequence[Run],
    metrics: Sequence[Metric] | None, settings: Settings,
) -> Comparison:  # fmt: skip
    """Returns how runs compare with references, each with its own tolerance.

    Args:
        names: of the references and of the runs.
        references: what the numbers should be.
        runs: what was measured.
        metrics: which ones; None: all that the references have.
        settings: seed and draws.

    Raises:
        ConfigError: no reference fits any run.
    """
    comparison = Comparison(names, settings)
    measured = points(runs)
    without: list[str] = []
    every = list({r.metric.name: r.metric for r in references}.values())
    for metric in every if metrics is None else metrics:
        verdicts = []
        for label, point in measured:
            fit = best(references, metric, point.runs[0])
            if fit is None:
                without.append(f"{metric.name} of {label}")
            else:
                own = replace(settings, tolerance=fit.tolerance)
                verdicts.append(judge(label, metric, fit.value, point, own))
        if verdicts:
            comparison.results += verdicts
            comparison.overall.append(overall(metric, verdicts, settings))
    if not comparison.results:
        raise ConfigError(
            f"no reference of {names[0]} fits a run of {names[1]}: cluster, point and metric must; "
            f"{_nearest(references, measured)}"
        )
    if without:
        comparison.notes.append(f"no reference for {listed(without, _MAX_LABELS, '; ')}")
    comparison.notes += _about_attempts(comparison, [point for _, point in measured])
    comparison.notes += _about_files(runs)
    return comparison


def write_junit(path: Path, comparison: Comparison) -> None:
    """Writes a comparison as JUnit's XML, for CI servers.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_atomically(path, junit_text(comparison), option="--junit FILE")


def junit_text(comparison: Comparison) -> str:
    """Returns a comparison as XML: a worse point is a failure, an unknown one is skipped."""
    names, settings, verdicts = comparison.names, comparison.settings, comparison.verdicts
    skipped = (UNKNOWN, UNDECIDED)
    counts = {
        "name": _xml_text(f"hires compare {names[0]} {names[1]}"),
        "tests": len(verdicts),
        "failures": sum(verdict.status == WORSE for verdict in verdicts),
        "skipped": sum(verdict.status in skipped for verdict in verdicts),
        "errors": 0,
    }
    facts = [("A", names[0]), ("B", names[1])]
    facts += [(key, str(getattr(settings, key))) for key in ("seed", "resamples", "confidence")]
    facts += [(d.what, f"{d.a} -> {d.b}") for d in [*comparison.config, *comparison.origin]]
    return rendered(
        "junit.xml",
        counts=counts,
        facts=[(_xml_text(name), _xml_text(value)) for name, value in facts],
        cases=[(v, _xml_text(v.point), _xml_text(sentence(v))) for v in verdicts],
        skipped=skipped,
    )


def sentence(verdict: PointVerdict) -> str:
    """Returns a verdict in one sentence."""
    if verdict.ratio is None:
        return f"{verdict.verdict}: {verdict.why}"
    unit, shown = verdict.metric.unit, verdict.metric.shown
    change = f"{100 * (verdict.ratio - 1):+.1f} %"
    if verdict.a is not None and verdict.b is not None:
        change = f"{shown(verdict.a):.6g} -> {shown(verdict.b):.6g} {unit}, {change}"
    if verdict.low is not None and verdict.high is not None:
        change += f" [{100 * (verdict.low - 1):+.1f} %, {100 * (verdict.high - 1):+.1f} %]"
    return f"{verdict.verdict}: {change}, tolerance {verdict.tolerance}; {verdict.why}"


def _xml_text(value: str) -> str:
    """Returns a text without characters that XML cannot hold, not even escaped."""
    kept = text(value, _MAX_XML_TEXT) or ""
    return kept.replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")


def _nearest(references: Sequence[Reference], measured: Sequence[tuple[str, ComparedPoint]]) -> str:
    """Returns how the first run differs from the reference that is most like it."""
    if not measured:
        return "there is no run"
    label, point = measured[0]
    misfits = min((r.misfits(point.runs[0]) for r in references), key=len, default=[])
    first = f"the first run is {label}"
    why = text(", ".join(misfits), _MAX_MISFITS)
    return f"{first}; of the nearest reference {why}" if misfits else first


def _about_attempts(comparison: Comparison, compared: Sequence[ComparedPoint]) -> list[str]:
    """Notes attempts that are left out, and peaks of whole processes: those differ by chance."""
    notes = []
    left_out = sum(point.num_left_out() for point in compared)
    if left_out:
        notes.append(
            f"{left_out} complete attempts of another commit or machine than the latest left out"
        )
    records = [attempt.record for point in compared for _, attempt in point.attempts()]
    rough = sum(any(e.get("source") == "rss" for e in dicts(r.get("memory"))) for r in records)
    if rough and any(verdict.metric.name == "memory" for verdict in comparison.results):
        notes.append(
            f"the memory of {rough} of {len(records)} attempts is that of whole processes, which "
            f"differs by chance, most for small networks; measure.warmup=2 measures that of a step"
        )
    return notes


def _about_repeats(comparison: Comparison) -> list[str]:
    """Notes seeds that are left out, too few repeats, and so many points that chance shows."""
    alone: dict[str, list[str]] = {}
    for verdict in comparison.results:
        if verdict.alone:
            words = f"seed{'s' if len(verdict.alone) > 1 else ''} {', '.join(verdict.alone)}"
            alone.setdefault(words, []).append(verdict.point)
    notes = [
        f"{words} left out, because only one side has {'them' if ',' in words else 'it'}: "
        f"{listed(list(dict.fromkeys(labels)), _MAX_LABELS, '; ')}"
        for words, labels in alone.items()
    ]
    if any(1 < min(verdict.repeats) < _FEW for verdict in comparison.results):
        notes.append(
            f"two repeats say little of their spread; from {_FEW} on intervals are much narrower"
        )
    judged = sum(verdict.low is not None for verdict in comparison.results)
    if judged >= _MANY:
        share = 1 - comparison.settings.confidence
        notes.append(
            f"of {judged} equal points about {share * judged:.0f} would differ "
            f"by chance; the tolerance keeps small ones out, repeats keep out more"
        )
    return notes


def _about_files(runs: Sequence[Run]) -> list[str]:
    notes = list(dict.fromkeys(f"{n.where}: {n.text}" for run in runs for n in run.notes))
    left = len(notes) - _MAX_NOTES
    return notes[:_MAX_NOTES] + ([f"and {left} more"] if left > 0 else [])
