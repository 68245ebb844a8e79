"""``hires compare A B``: tells whether B is better or worse than A, and what else differs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.options import Parser, chosen
from hires.core.errors import REGRESSION, ConfigError, RunError
from hires.core.store.launch_file import reproduce_line
from hires.report.compare.metrics import METRICS

TOLERANCE = "5%"
_FEWEST = 100
"""With fewer resamples the ends of an interval are themselves random."""

_EXAMPLES = (
    "hires compare before after                            two campaigns, point by point",
    "hires compare 0123abcd 4567cdef --metric memory       two runs",
    "hires compare before after --tolerance=-3%,+10% --junit compare.xml",
    "hires compare before --write-reference results/reference.yaml",
    "hires compare after --reference results/reference.yaml",
)


def parser() -> Parser:
    """Returns the parser of the verb."""
    text = (
        "Compare runs, campaigns or references: A is the earlier one, B the later one. Points are\n"
        "paired by config without the seed. A point differs if the bootstrap interval of B/A does\n"
        "not hold 1 and B/A is outside the tolerance. Exit code 4 if anything became worse, 1 if\n"
        "nothing is decided: no point has numbers, or all intervals are much wider than the\n"
        "tolerance."
    )
    parser = Parser("compare", text, _EXAMPLES)
    parser.add_names("run, campaign or reference.yaml", nargs="+", metavar="A B")
    text = f"any of {', '.join(METRICS)} (default: throughput; with references: all they have)"
    parser.add("--metric", metavar="LIST", complete=METRICS, help=text)
    text = f"largest change that is accepted, as 5%% or -5%%,+15%% (default: {TOLERANCE}%)"
    parser.add("--tolerance", metavar="PERCENT", help=text)
    parser.add("--reference", metavar="FILE", help="compare to the values in a file")
    text = "keep the values of the runs in such a file"
    parser.add("--write-reference", metavar="FILE", help=text)
    text = "hosts for which the reference holds, as 'node*' (default: that of the runs)"
    parser.add("--cluster", metavar="HOSTS", help=text)
    parser.add("--junit", metavar="FILE", help="write JUnit's XML, for CI servers")
    parser.add("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    text = "of the bootstrap (default: 2000)"
    parser.add("--resamples", type=int, default=2000, metavar="N", help=text)
    parser.add_json()
    return parser


def main(words: Sequence[str]) -> int:
    """Prints a comparison; returns 0, or 4 if anything became worse.

    Raises:
        RunError: nothing could be compared, or nothing is decided.
    """
    args = parser().read(words)
    if args.write_reference is not None:
        return _write_reference(args, words)
    from hires.cli.screens.show_compare import comparison_lines
    from hires.report.compare.comparison import write_junit

    comparison = _compare(args)
    if args.junit is not None:
        write_junit(Path(args.junit), comparison)
    if args.json:
        print(json.dumps(comparison.to_dict(), indent=2))
    else:
        comparison_lines(comparison)
    if comparison.is_worse:
        return REGRESSION
    if not comparison.is_decided:
        raise RunError("nothing is decided: see why in the last column")
    return 0


def _compare(args: Any) -> Any:
    """Returns the comparison that the options describe."""
    from hires.report.compare import comparison, references
    from hires.report.compare.verdicts import Settings, parse_tolerance

    names, file = list(args.names), args.reference
    files = [name for name in names if references.is_reference(name)]
    if file is None and len(files) == 1 and len(names) == 2:
        file = files[0]
        names.remove(file)
    _check(args, names, file)
    tolerance = parse_tolerance(TOLERANCE if args.tolerance is None else args.tolerance)
    settings = Settings(tolerance, args.seed, args.resamples)
    if file is not None:
        values, runs = references.read(Path(file)), _runs(names[0], args.results)
        metrics = None if args.metric is None else _metrics(args.metric)
        return comparison.compare_references((file, names[0]), values, runs, metrics, settings)
    a, b = (_runs(name, args.results) for name in names)
    return comparison.compare_runs((names[0], names[1]), a, b, _metrics(args.metric), settings)


def _check(args: Any, names: Sequence[str], file: str | None) -> None:
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


def _metrics(names: str | None) -> list[Any]:
    known = chosen("--metric", "throughput" if names is None else names, METRICS)
    return [METRICS[name] for name in known]


def _runs(name: str, results: str) -> list[Any]:
    """Returns the runs of a name, each with its state.

    Raises:
        ConfigError: it is neither a campaign nor a run, or has no run.
    """
    from hires.cli.run_rows import add_live_states
    from hires.launcher.status.run_selection import select
    from hires.report.load.runs import read_runs

    runs = read_runs(select([name], results).paths)
    if not runs:
        raise ConfigError(f"{name} has no run; start one with `hires run campaign={name}`")
    add_live_states(runs)
    return runs


def _write_reference(args: Any, words: Sequence[str]) -> int:
    from hires.report.compare import references
    from hires.report.compare.pairing import points
    from hires.report.compare.verdicts import parse_tolerance
    from hires.report.load.repeats import middle

    if len(args.names) != 1 or args.reference or args.junit:
        raise ConfigError("--write-reference takes one run or campaign, and nothing to compare to")
    tolerance = parse_tolerance(TOLERANCE if args.tolerance is None else args.tolerance)
    runs = _runs(args.names[0], args.results)
    keys, made = references.apart(runs), []
    for _, point in points(runs):
        for metric in _metrics(args.metric):
            value = middle(point.repeats(metric))
            if value is not None:
                reference = references.from_point(point, metric, value, tolerance, keys)
                cluster = args.cluster or reference.cluster
                made.append(dataclasses.replace(reference, cluster=cluster))
    if not made:
        raise ConfigError(f"{args.names[0]} has no complete run with such a number")
    path = Path(args.write_reference)
    held = references.write(path, made, reproduce_line(["hires", "compare", *words]))
    if args.json:
        print(json.dumps({"file": str(path), "written": len(made), "held": held}))
    else:
        print(f"{path}: {len(made)} written, {held} in all")
    return 0
