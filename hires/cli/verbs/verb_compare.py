"""``hires compare``: compare B with A; exit code 4 if anything is worse."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from hires.cli.options import JSON, Parser, chosen, named_runs, option
from hires.cli.screen import percent, print_json, print_notes, print_result, print_table, shown
from hires.cli.verbs.list_runs import add_live_states
from hires.core.errors import REGRESSION, ConfigError, RunError
from hires.core.ranks.mpi_starter import reproduce_line
from hires.core.units import listed
from hires.launcher.status.state import select
from hires.report.columns import Column
from hires.report.compare import comparison
from hires.report.compare.bootstrap import CONFIDENCE
from hires.report.compare.comparison import Comparison, compare_references, compare_runs
from hires.report.compare.verdicts import METRICS, Metric, PointVerdict, Settings, parse_tolerance
from hires.report.runs import Run, read_runs

TOLERANCE = "5%"
_MAX_CAUSES = 3  # of what could not be decided, in one line
PARSER = Parser(
    "compare",
    (
        "hires compare before after                            two campaigns, point by point",
        "hires compare 0123abcd 4567cdef --metric memory       two runs",
        "hires compare before after --tolerance=-3%,+10%",
        "hires compare before --write-reference results/reference.yaml",
        "hires compare after --reference results/reference.yaml",
    ),
    *named_runs("run, campaign or reference.yaml", nargs="+", metavar="A B"),
    option(
        "--metric",
        "LIST",
        f"any of {', '.join(METRICS)} (default: throughput; with references: all they have)",
    ),
    option("--tolerance", "PERCENT", f"accepted change, 5%% or -5%%,+15%% (default: {TOLERANCE}%)"),
    option("--reference", "FILE", "compare to the values in a file"),
    option("--write-reference", "FILE", "keep the values of the runs in such a file"),
    option("--cluster", "HOSTS", "hosts of the reference, as 'node*' (default: that of the runs)"),
    JSON,
    more="A and B are runs, campaigns or references, B the later one. Points are paired by config\n"
    "without the seed. A point differs if the bootstrap interval of B/A does not hold 1 and B/A\n"
    "is outside the tolerance. Exit code 1 if nothing is decided: no point has numbers, or all\n"
    "intervals are unknown or much wider than the tolerance.",
)


def main(args: Namespace) -> int:
    """Prints a comparison; returns 0, 4 if anything became worse, 1 if nothing is decided."""
    names, file = list(args.names), args.reference
    writes = args.write_reference is not None
    if file is None and len(names) == 2:
        file = next((name for name in names if name.endswith((".yaml", ".yml"))), None)
        names = [name for name in names if name != file]
    wanted = 1 if writes or file else 2
    if len(names) != wanted or (writes and file):
        needs = "two runs, campaigns or references: A and B"
        if wanted == 1:
            needs = f"one run or campaign beside {'--write-reference' if writes else file}"
        raise ConfigError(f"hires compare needs {needs}, and got {' '.join(args.names)}")
    if args.cluster is not None and not writes:
        raise ConfigError("--cluster is for --write-reference FILE")
    if file is not None and args.tolerance is not None:
        raise ConfigError(f"--tolerance is for A and B; {file} has tolerances of its own")
    settings = Settings(parse_tolerance(args.tolerance or TOLERANCE))
    metrics = [METRICS[m] for m in chosen("--metric", args.metric or "throughput", METRICS)]
    sides = [_runs(name, args.results) for name in names]
    if writes:
        return _write(args, metrics, sides[0], settings)
    try:
        if file is not None:
            known, every = comparison.read_references(Path(file)), metrics if args.metric else None
            result = compare_references((file, names[0]), known, sides[0], every, settings)
        else:
            (a, b), pair = sides, (names[0], names[1])
            result = compare_runs(pair, a, b, metrics, settings)
    except ConfigError:  # which what is damaged may have caused
        print_notes([note for side in sides for run in side for note in run.notes])
        raise
    if args.json:
        print_json(result.to_dict())
    else:
        _print(result)
    if result.is_worse:
        return REGRESSION
    if not result.is_decided:
        why = listed([*dict.fromkeys(one.why for one in result.results)], _MAX_CAUSES, "; ")
        print(f"hires: nothing is decided: {why}", file=sys.stderr)
        return RunError.exit_code
    return 0


def _runs(name: str, results: str) -> list[Run]:
    runs = read_runs(select([name], results).paths)
    if not runs:
        raise ConfigError(f"{name} has no run; start one with `hires run campaign={name}`")
    add_live_states(runs)
    return runs


def _write(args: Namespace, metrics: list[Metric], runs: list[Run], settings: Settings) -> int:
    written = comparison.measured_references(runs, metrics, settings.tolerance, args.cluster)
    if not written:
        raise ConfigError(f"{args.names[0]} has no complete run with such a number")
    path = Path(args.write_reference)
    total = comparison.write_references(path, written, reproduce_line(args.argv))
    facts = {"file": str(path), "written": len(written), "held": total}
    print_result(args.json, facts, f"{path}: {len(written)} written, {total} in all")
    return 0


def _print(result: Comparison) -> None:
    a, b = result.names
    draws = f"{result.settings.resamples} resamples, seed {result.settings.seed}"
    print(f"A: {a}\nB: {b}\n{100 * CONFIDENCE:g} % bootstrap intervals of B/A, {draws}\n")
    for overall in result.overall:
        metric = overall.metric
        numbers = [Column(side, side, metric.unit, digits=2) for side in ("A", "B")]
        numbers += [Column("change", "change", "%", digits=1), Column("interval", "interval", "%")]
        columns: list[Column | str] = ["point", "verdict", *numbers, "tolerance", "drawn from"]
        better = "higher" if metric.higher_is_better else "lower"
        points = [one for one in result.results if one.metric is metric]
        rows = [_row(one) for one in (*points, *([overall] if len(points) > 1 else []))]
        title = f"{metric.name}: {metric.what}; {better} is better"
        print_table(title, columns, rows)
    if differences := [*result.config, *result.origin]:
        print_table("What differs", ("key", "A", "B"), [[d.what, d.a, d.b] for d in differences])
    for note in result.notes:
        print(f"note: {note}")


def _row(verdict: PointVerdict) -> list[str]:
    interval = verdict.interval
    return [
        verdict.point,
        verdict.verdict if verdict.status != "worse" else f"{verdict.verdict} (worse)",
        *(shown(verdict.metric.shown(value)) for value in (verdict.a, verdict.b)),
        percent(verdict.ratio),
        "-" if interval is None else " to ".join(map(percent, interval)),
        shown(verdict.tolerance),
        verdict.why,
    ]
