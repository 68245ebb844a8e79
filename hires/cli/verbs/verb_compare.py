"""``hires compare A B``: is B better or worse than A, and what else differs?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.compose.nearest import offer
from hires.cli.options import Parser, add_json, add_results
from hires.core.errors import REGRESSION, ConfigError, RunError
from hires.core.store.launch_file import reproduce_line

METRICS = ("throughput", "step_time", "memory", "loss")
TOLERANCE = "5%"
_FEWEST = 100
"""Resamples below which the ends of an interval would be chance themselves."""

_EXAMPLES = (
    "hires compare before after                            two campaigns, point by point",
    "hires compare 0123abcd 4567cdef --metric memory       two runs",
    "hires compare before after --tolerance=-3%,+10% --junit compare.xml",
    "hires compare before --write-reference results/reference.yaml",
    "hires compare after --reference results/reference.yaml",
)


def main(words: Sequence[str]) -> int:
    """Prints a comparison; returns 0, or 4 if anything became worse.

    Raises:
        RunError: nothing could be compared, or nothing is decided.
    """
    args = _parser().read(words)
    if args.write_reference is not None:
        return _write_reference(args, words)
    from hires.cli.screens.show_compare import comparison_lines
    from hires.report.compare.junit import write_junit

    made = _compare(args)
    if args.junit is not None:
        write_junit(Path(args.junit), made)
    if args.json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        comparison_lines(made)
    if made.is_worse:
        return REGRESSION
    if not made.is_decided:
        raise RunError("nothing is decided: see why in the last column")
    return 0


def _parser() -> Parser:
    """Returns the parser of the verb."""
    text = (
        "Compare runs, campaigns or references: A is what was, B is what is. Points are paired\n"
        "by config, seed apart. A point differs if the bootstrap interval of B/A leaves out 1 and\n"
        "B/A is outside the tolerance. Exit code 4 if anything became worse,\n"
        "1 if nothing is decided: no point has numbers, or all intervals are much wider than the\n"
        "tolerance."
    )
    parser = Parser("compare", text, _EXAMPLES)
    parser.add_argument("names", nargs="+", metavar="A B", help="run, campaign or reference.yaml")
    parser.add_argument(
        "--metric",
        metavar="LIST",
        help=f"any of {', '.join(METRICS)} (default throughput; with references: all they have)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="PERCENT",
        help=f"what does not matter, as 5%% or -5%%,+15%% (default {TOLERANCE}%)",
    )
    parser.add_argument("--reference", metavar="FILE", help="compare to the values in a file")
    parser.add_argument(
        "--write-reference", metavar="FILE", help="keep what the runs came to in such a file"
    )
    parser.add_argument(
        "--cluster",
        metavar="HOSTS",
        help="hosts that it is for, as 'node*' (default: that of the runs)",
    )
    parser.add_argument("--junit", metavar="FILE", help="write JUnit's XML, for CI servers")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default 0)")
    parser.add_argument(
        "--resamples", type=int, default=2000, metavar="N", help="of the bootstrap (default 2000)"
    )
    add_results(parser)
    add_json(parser)
    return parser


def _compare(args: Any) -> Any:
    """Returns the comparison that the options ask for."""
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
    metrics = _metrics(args.metric)
    if file is not None:
        known = references.read(Path(file))
        runs = _runs(names[0], args.results)
        return comparison.compare_references((file, names[0]), known, runs, metrics, settings)
    sides = [_runs(name, args.results) for name in names]
    asked = metrics or _metrics("throughput") or []
    return comparison.compare_runs((names[0], names[1]), sides[0], sides[1], asked, settings)


def _check(args: Any, names: Sequence[str], file: str | None) -> None:
    """Refuses options that make no sense together."""
    wanted = 1 if file is not None else 2
    if len(names) != wanted:
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


def _metrics(said: str | None) -> list[Any] | None:
    """Returns the metrics that are asked for; None if none is named.

    Raises:
        ConfigError: one does not exist.
    """
    from hires.report.compare.metrics import METRICS as KNOWN

    if said is None:
        return None
    names = [name.strip() for name in said.split(",") if name.strip()]
    for name in names:
        if name not in KNOWN:
            raise ConfigError(f"--metric {name!r} is unknown; {offer(name, KNOWN)}")
    if not names:
        raise ConfigError(f"--metric names none; choose from {', '.join(KNOWN)}")
    return [KNOWN[name] for name in dict.fromkeys(names)]


def _runs(name: str, results: str) -> list[Any]:
    """Returns the runs that a name means, with how they are doing.

    Raises:
        ConfigError: it is neither a campaign nor a run, or has no run.
    """
    from hires.cli.run_rows import tell
    from hires.launcher.status.run_selection import select
    from hires.report.load.runs import read_runs

    runs = read_runs(select([name], results).paths)
    if not runs:
        raise ConfigError(f"{name} has no run; start one with `hires run campaign={name}`")
    tell(runs)
    return runs


def _write_reference(args: Any, words: Sequence[str]) -> int:
    """Writes what runs came to into a file of references; returns 0."""
    import dataclasses

    from hires.report.compare import references
    from hires.report.compare.pairing import points
    from hires.report.compare.repeated_points import middle
    from hires.report.compare.verdicts import parse_tolerance

    if len(args.names) != 1 or args.reference or args.junit:
        raise ConfigError("--write-reference takes one run or campaign, and nothing to compare to")
    tolerance = parse_tolerance(TOLERANCE if args.tolerance is None else args.tolerance)
    runs = _runs(args.names[0], args.results)
    keys, made = references.apart(runs), []
    for _, point in points(runs):
        for metric in _metrics(args.metric) or _metrics("throughput") or []:
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
