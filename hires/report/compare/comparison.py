"""How does B do beside A, or beside references? All points, all metrics, and what differs else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hires.core.errors import ConfigError
from hires.core.store.reading import text
from hires.report.compare.bootstrap import Estimate
from hires.report.compare.differences import (
    Difference,
    config_differences,
    origin_differences,
)
from hires.report.compare.metrics import Metric
from hires.report.compare.pairing import Point, pair, points
from hires.report.compare.references import Reference, best
from hires.report.compare.verdicts import (
    DECIDED,
    WORSE,
    Result,
    Settings,
    judge,
    judge_beside,
    overall,
)
from hires.report.load.plain_values import dicts
from hires.report.load.runs import Run

_FEW = 3
"""Repeats from which on their spread is known at least roughly."""
_MOST_NOTES = 5
"""Notes of what could not be read that are told."""
_LONGEST = 300
"""Characters of what keeps a run and a reference apart."""
_MANY = 20
"""From so many points on chance alone calls some of them different."""


@dataclass
class Comparison:
    """Everything that a comparison found."""

    names: tuple[str, str]
    settings: Settings
    results: list[Result] = field(default_factory=list)
    """One for every point and metric."""
    overall: list[Result] = field(default_factory=list)
    """One for every metric."""
    config: list[Difference] = field(default_factory=list)
    origin: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_worse(self) -> bool:
        """Whether anything became worse."""
        return any(result.status == WORSE for result in [*self.results, *self.overall])

    @property
    def is_decided(self) -> bool:
        """Whether anything is known to be better, worse or the same."""
        return any(result.status in DECIDED for result in [*self.results, *self.overall])

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
            "overall": [result.to_dict() for result in self.overall],
            "points": [result.to_dict() for result in self.results],
            "config": [vars(difference) for difference in self.config],
            "origin": [vars(difference) for difference in self.origin],
            "notes": self.notes,
        }


def compare_runs(
    names: tuple[str, str],
    a: Sequence[Run],
    b: Sequence[Run],
    metrics: Sequence[Metric],
    settings: Settings,
) -> Comparison:
    """Returns how the runs of B do beside those of A.

    Raises:
        ConfigError: they share no point.
    """
    pairing = pair(a, b)
    if not pairing.points:
        raise ConfigError(
            f"{names[0]} and {names[1]} share no point: their configs differ in keys that have "
            f"several values on a side; name runs or campaigns that differ in one thing"
        )
    made = Comparison(names, settings)
    for metric in metrics:
        judged = [judge(label, metric, old, new, settings) for label, old, new in pairing.points]
        _add(made, metric, judged)
    made.config, made.origin = config_differences(a, b), origin_differences(a, b)
    for side, labels in zip(names, (pairing.only_a, pairing.only_b), strict=True):
        if labels:
            made.notes.append(f"only in {side}: {_listed(labels)}")
    compared = [point for _, *both in pairing.points for point in both]
    made.notes += _left_out(compared) + _rough_peaks(made, compared)
    made.notes += _alone(made) + _few_repeats(made) + _by_chance(made) + _unread([*a, *b])
    return made


def compare_references(
    names: tuple[str, str],
    references: Sequence[Reference],
    runs: Sequence[Run],
    metrics: Sequence[Metric] | None,
    settings: Settings,
) -> Comparison:
    """Returns how runs do beside references, each with its own tolerance.

    Args:
        names: of the references and of the runs.
        references: what should be.
        runs: what is.
        metrics: which ones; None: all that the references have.
        settings: seed and draws.

    Raises:
        ConfigError: no reference fits any run.
    """
    made = Comparison(names, settings)
    found = points(runs)
    without: list[str] = []
    asked = list({r.metric.name: r.metric for r in references}.values())
    for metric in asked if metrics is None else metrics:
        judged = []
        for label, point in found:
            fit = best(references, metric, point.runs[0])
            if fit is None:
                without.append(f"{metric.name} of {label}")
                continue
            own = Settings(fit.tolerance, settings.seed, settings.resamples, settings.confidence)
            judged.append(judge_beside(label, metric, fit.value, point, own))
        if judged:
            _add(made, metric, judged)
    if not made.results:
        raise ConfigError(
            f"no reference of {names[0]} fits a run of {names[1]}: cluster, point and metric must; "
            f"{_nearest(references, found)}"
        )
    if without:
        made.notes.append(f"no reference for {_listed(without)}")
    compared = [point for _, point in found]
    made.notes += _left_out(compared) + _rough_peaks(made, compared) + _unread(runs)
    return made


def _nearest(references: Sequence[Reference], found: Sequence[tuple[str, Point]]) -> str:
    """Returns what keeps the first run apart from the reference that differs least from it."""
    if not found:
        return "there is no run"
    label, point = found[0]
    told = f"the first run is {label}"
    misfits = min((r.misfits(point.runs[0]) for r in references), key=len, default=[])
    why = text(", ".join(misfits), _LONGEST)
    return f"{told}; of the nearest reference {why}" if misfits else told


def _add(
    made: Comparison, metric: Metric, judged: Sequence[tuple[Result, Estimate | None]]
) -> None:
    """Adds what was found of a metric."""
    results = [result for result, _ in judged]
    estimates = [estimate for _, estimate in judged if estimate is not None]
    made.results += results
    made.overall.append(overall(metric, results, estimates, made.settings))


def _left_out(found: Sequence[Point]) -> list[str]:
    """Says how many attempts were made by other code or machines than the latest ones."""
    count = sum(point.left_out() for point in found)
    if not count:
        return []
    return [f"{count} complete attempts of another commit or machine than the latest left out"]


def _rough_peaks(made: Comparison, found: Sequence[Point]) -> list[str]:
    """Says how many peaks are those of a whole process: they differ where nothing else does."""
    if not any(result.metric.name == "memory" for result in made.results):
        return []
    told = [attempt.record for point in found for _, attempt in point.attempts()]
    rough = sum(any(e.get("source") == "rss" for e in dicts(r.get("memory"))) for r in told)
    if not rough:
        return []
    return [
        f"the memory of {rough} of {len(told)} attempts is that of whole processes, which differs "
        f"by chance, most for small networks; measure.warmup=2 measures that of a step"
    ]


def _alone(made: Comparison) -> list[str]:
    """Says which seeds count nowhere because only one side has them."""
    found: dict[str, list[str]] = {}
    for result in made.results:
        if result.alone:
            words = f"seed{'s' if len(result.alone) > 1 else ''} {', '.join(result.alone)}"
            found.setdefault(words, []).append(result.point)
    return [
        f"{words} left out, because only one side has {'them' if ',' in words else 'it'}: "
        f"{_listed(list(dict.fromkeys(labels)))}"
        for words, labels in found.items()
    ]


def _unread(runs: Sequence[Run]) -> list[str]:
    """Says what of the runs' folders could not be used."""
    told = list(dict.fromkeys(f"{n.where}: {n.text}" for run in runs for n in run.notes))
    left = len(told) - _MOST_NOTES
    return told[:_MOST_NOTES] + ([f"and {left} more"] if left > 0 else [])


def _few_repeats(made: Comparison) -> list[str]:
    """Says that two repeats tell little of how far repeats differ."""
    if not any(1 < min(result.repeats) < _FEW for result in made.results):
        return []
    return [f"two repeats say little of their spread; from {_FEW} on intervals are much narrower"]


def _by_chance(made: Comparison) -> list[str]:
    """Says how many of many points look different by chance."""
    judged = [result for result in made.results if result.low is not None]
    if len(judged) < _MANY:
        return []
    share = 1 - made.settings.confidence
    return [
        f"of {len(judged)} equal points about {share * len(judged):.0f} would be found different "
        f"by chance; the tolerance keeps small ones out, repeats keep out more"
    ]


def _listed(labels: Sequence[str], most: int = 4) -> str:
    """Returns labels in words, of many the first ones."""
    left = len(labels) - most
    return "; ".join(labels[:most]) + (f"; and {left} more" if left > 0 else "")
