"""``hires compare A B``: tells whether B is better or worse than A, and what else differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hires.cli.options import JSON, Parser, chosen, named_runs, option
from hires.cli.screens.screen import print_table
from hires.core.errors import REGRESSION, ConfigError, RunError
from hires.core.store.files import write_atomically
from hires.core.store.launch_file import reproduce_line
from hires.report.columns import Column
from hires.report.compare.metrics import METRICS, Metric

if TYPE_CHECKING:  # pandas would keep --help and the shell completion waiting
    from hires.report.compare.comparison import Comparison
    from hires.report.compare.verdicts import PointVerdict
    from hires.report.load.runs import Run

TOLERANCE = "5%"
_FEWEST = 100
"""With fewer resamples the ends of an interval are themselves random."""
_DIGITS = 5
"""Significant digits of a number."""
PARSER = Parser(
    "compare",
    "Compare runs, campaigns or references: A is the earlier one, B the later one. Points are\n"
    "paired by config without the seed. A point differs if the bootstrap interval of B/A does\n"
    "not hold 1 and B/A is outside the tolerance. Exit code 4 if anything became worse, 1 if\n"
    "nothing is decided: no point has numbers, or all intervals are much wider than the\n"
    "tolerance.",
    (
        "hires compare before after                            two campaigns, point by point",
        "hires compare 0123abcd 4567cdef --metric memory       two runs",
        "hires compare before after --tolerance=-3%,+10% --junit compare.xml",
        "hires compare before --write-reference results/reference.yaml",
        "hires compare after --reference results/reference.yaml",
    ),
    *named_runs("run, campaign or reference.yaml", nargs="+", metavar="A B"),
    option(
        "--metric",
        metavar="LIST",
        complete=METRICS,
        help=f"any of {', '.join(METRICS)} (default: throughput; with references: all they have)",
    ),
    option(
        "--tolerance",
        metavar="PERCENT",
        help=f"largest change that is accepted, as 5%% or -5%%,+15%% (default: {TOLERANCE}%)",
    ),
    option("--reference", metavar="FILE", help="compare to the values in a file"),
    option("--write-reference", metavar="FILE", help="keep the values of the runs in such a file"),
    option(
        "--cluster",
        metavar="HOSTS",
        help="hosts for which the reference holds, as 'node*' (default: that of the runs)",
    ),
    option("--junit", metavar="FILE", help="write JUnit's XML, for CI servers"),
    option("--seed", type=int, default=0, help="of the bootstrap (default: 0)"),
    option(
        "--resamples", type=int, default=2000, metavar="N", help="of the bootstrap (default: 2000)"
    ),
    JSON,
)


def main(words: Sequence[str]) -> int:
    """Prints a comparison; returns 0, 4 if anything became worse, 1 if nothing is decided."""
    args = PARSER.read(words)
    if args.write_reference is not None:
        return _write_reference(args, words)
    from hires.report.compare.comparison import junit_text

    comparison = _compare(args)
    if args.junit is not None:
        write_atomically(args.junit, junit_text(comparison), option="--junit FILE")
    if args.json:
        print(json.dumps(comparison.to_dict(), indent=2))
    else:
        _print(comparison)
    if comparison.is_worse:
        return REGRESSION
    if not comparison.is_decided:
        raise RunError("nothing is decided: see why in the last column")
    return 0


def _compare(args: Any) -> Comparison:
    """Returns the comparison that the options describe."""
    from hires.report.compare import comparison, references
    from hires.report.compare.verdicts import Settings, parse_tolerance

    names, file = list(args.names), args.reference
    files = [name for name in names if references.is_reference(name)]
    if file is None and len(files) == 1 and len(names) == 2:
        file = files[0]
        names.remove(file)
    if len(names) != (1 if file is not None else 2):
        needs = "one run or campaign" if file else "two runs, campaigns or references: A and B"
        raise ConfigError(f"hires compare needs {needs}, and got {' '.join(names) or 'none'}")
    if file is not None and args.tolerance is not None:
        raise ConfigError(f"--tolerance is for A and B; {file} has tolerances of its own")
    if args.cluster is not None:
        raise ConfigError("--cluster is for --write-reference FILE")
    if args.resamples < _FEWEST:
        raise ConfigError(f"--resamples {args.resamples} is too few; use {_FEWEST} or more")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must be at least 0")
    settings = Settings(
        parse_tolerance(TOLERANCE if args.tolerance is None else args.tolerance),
        args.seed,
        args.resamples,
    )
    if file is not None:
        values, runs = references.read(Path(file)), _runs(names[0], args.results)
        metrics = None if args.metric is None else _metrics(args.metric)
        return comparison.compare_references((file, names[0]), values, runs, metrics, settings)
    a, b = (_runs(name, args.results) for name in names)
    return comparison.compare_runs((names[0], names[1]), a, b, _metrics(args.metric), settings)


def _metrics(names: str | None) -> list[Metric]:
    wanted = chosen("--metric", "throughput" if names is None else names, METRICS)
    return [METRICS[name] for name in wanted]


def _runs(name: str, results: str) -> list[Run]:
    """Returns the runs of a name, each with its state."""
    from hires.cli.verbs.list_runs import add_live_states
    from hires.launcher.status.run_selection import select
    from hires.report.load.runs import read_runs

    runs = read_runs(select([name], results).paths)
    if not runs:
        raise ConfigError(f"{name} has no run; start one with `hires run campaign={name}`")
    add_live_states(runs)
    return runs


def _write_reference(args: Any, words: Sequence[str]) -> int:
    from hires.report.compare import references
    from hires.report.compare.verdicts import parse_tolerance

    if len(args.names) != 1 or args.reference or args.junit:
        raise ConfigError("--write-reference takes one run or campaign, and nothing to compare to")
    tolerance = parse_tolerance(TOLERANCE if args.tolerance is None else args.tolerance)
    runs = _runs(args.names[0], args.results)
    written = references.measured(runs, _metrics(args.metric), tolerance, args.cluster)
    if not written:
        raise ConfigError(f"{args.names[0]} has no complete run with such a number")
    path = Path(args.write_reference)
    total = references.write(path, written, reproduce_line(["hires", "compare", *words]))
    if args.json:
        print(json.dumps({"file": str(path), "written": len(written), "held": total}))
    else:
        print(f"{path}: {len(written)} written, {total} in all")
    return 0


def _print(comparison: Comparison) -> None:
    """Prints the points of every metric, what they come to together, and what else differs."""
    a, b = comparison.names
    settings = comparison.settings
    print(f"A: {a}\nB: {b}")
    print(
        f"{100 * settings.confidence:g} % bootstrap intervals of B/A, {settings.resamples} "
        f"resamples, seed {settings.seed}\n"
    )
    for result in comparison.overall:
        metric = result.metric
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
        better = "higher" if metric.higher_is_better else "lower"
        rows = [_row(metric, one) for one in comparison.results if one.metric is metric]
        print_table(f"{metric.name}: {metric.what}; {better} is better", columns, rows)
        if len(rows) > 1:
            mean = " (geometric mean of B/A)" if result.ratio else ""
            print(f"overall {metric.name}: {result.sentence()}{mean}\n")
    differences = [*comparison.config, *comparison.origin]
    if differences:
        columns = [Column("what", "key"), Column("a", "A"), Column("b", "B")]
        print_table("What differs", columns, [[d.what, d.a, d.b] for d in differences])
    for note in comparison.notes:
        print(f"note: {note}")


def _row(metric: Metric, result: PointVerdict) -> list[str]:
    values = [metric.shown(value) for value in (result.a, result.b)]
    interval = change = "-"
    if result.ratio is not None:
        change = f"{100 * (result.ratio - 1):+.1f}"
    if result.interval is not None:
        interval = " to ".join(f"{100 * (end - 1):+.1f}" for end in result.interval)
    return [
        result.point,
        result.verdict if result.status != "worse" else f"{result.verdict} (worse)",
        *("-" if value is None else f"{value:.{_DIGITS}g}" for value in values),
        change,
        interval,
        "-" if result.tolerance is None else str(result.tolerance),
        result.why,
    ]
