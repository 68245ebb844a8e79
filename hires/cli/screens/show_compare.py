"""Prints a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from hires.cli.screens.screen import print_table
from hires.report.columns import Column
from hires.report.compare.comparison import Comparison, sentence
from hires.report.compare.differences import Difference
from hires.report.compare.metrics import Metric
from hires.report.compare.verdicts import PointVerdict

_DIGITS = 5
"""Significant digits of a number."""


def comparison_lines(made: Comparison) -> None:
    """Prints the points of every metric, what they come to together, and what else differs."""
    a, b = made.names
    settings = made.settings
    print(f"A: {a}\nB: {b}")
    print(
        f"{100 * settings.confidence:g} % bootstrap intervals of B/A, {settings.resamples} "
        f"resamples, seed {settings.seed}\n"
    )
    for result in made.overall:
        own = [one for one in made.results if one.metric is result.metric]
        _print_points(result.metric, own)
        if len(own) > 1:
            mean = " (geometric mean of B/A)" if result.ratio else ""
            print(f"overall {result.metric.name}: {sentence(result)}{mean}\n")
    _print_differences("What differs", [*made.config, *made.origin])
    for note in made.notes:
        print(f"note: {note}")


def _print_points(metric: Metric, results: Sequence[PointVerdict]) -> None:
    better = "higher" if metric.higher_is_better else "lower"
    columns = [
        Column("point", "point"),
        Column("verdict", "verdict"),
        Column("a", "A", metric.unit, digits=2),
        Column("b", "B", metric.unit, digits=2),
        Column("change", "change", "%", digits=1),
        Column("interval", "interval", "%"),
        Column("tolerance", "tolerance"),
        Column("why", "drawn from"),
    ]
    title = f"{metric.name}: {metric.what}; {better} is better"
    print_table(title, columns, [_row(metric, result) for result in results])


def _row(metric: Metric, result: PointVerdict) -> list[str]:
    values = [None if v is None else metric.shown(v) for v in (result.a, result.b)]
    interval = change = "-"
    if result.ratio is not None:
        change = f"{100 * (result.ratio - 1):+.1f}"
    if result.low is not None and result.high is not None:
        interval = f"{100 * (result.low - 1):+.1f} to {100 * (result.high - 1):+.1f}"
    return [
        result.point,
        result.verdict if result.status != "worse" else f"{result.verdict} (worse)",
        *("-" if value is None else f"{value:.{_DIGITS}g}" for value in values),
        change,
        interval,
        "-" if result.tolerance is None else str(result.tolerance),
        result.why,
    ]


def _print_differences(title: str, differences: Sequence[Difference]) -> None:
    if not differences:
        return
    columns = [Column("what", "key"), Column("a", "A"), Column("b", "B")]
    print_table(title, columns, [[d.what, d.a, d.b] for d in differences])
