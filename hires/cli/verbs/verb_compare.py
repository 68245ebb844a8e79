"""``hires compare``: compare B with A; exit code 4 if anything is worse."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from hires.cli.options import JSON, Parser, chosen, named_runs, number, option
from hires.cli.screens.screen import percent, print_json, print_notes, print_table, shown
from hires.cli.verbs.list_runs import add_live_states
from hires.core.errors import REGRESSION, ConfigError, RunError
from hires.core.store.launch_file import reproduce_line
from hires.launcher.status.run_selection import select
from hires.report.columns import Column
from hires.report.compare import comparison, references
from hires.report.compare.bootstrap import CONFIDENCE
from hires.report.compare.comparison import Comparison
from hires.report.compare.metrics import METRICS, Metric
from hires.report.compare.verdicts import PointVerdict, Settings, parse_tolerance
from hires.report.config_values import listed
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
    number("--seed", "of the bootstrap", default=0, least=0),
    # With fewer resamples the ends of an interval are themselves random.
    number("--resamples", "of the bootstrap", default=2000, least=100),
    JSON,
    more="A and B are runs, campaigns or references, B the later one. Points are paired by config\n"
    "without the seed. A point differs if the bootstrap interval of B/A does not hold 1 and B/A\n"
    "is outside the tolerance. Exit code 1 if nothing is decided: no point has numbers, or all\n"
    "intervals are much wider than the tolerance.",
)


def main(args: Namespace) -> int:
    """Prints a comparison; returns 0, 4 if anything became worse, 1 if nothing is decided."""
    if args.write_reference is not None:
        return _write_reference(args)
    made = _compare(args)
    if args.json:
        print_json(made.to_dict())
    else:
        _print(made)
    if made.is_worse:
        return REGRESSION
    if not made.is_decided:
        why = listed(list(dict.fromkeys(one.why for one in made.results)), _MAX_CAUSES, "; ")
        print(f"hires: nothing is decided: {why}", file=sys.stderr)
        return RunError.exit_code
    return 0


def _compare(args: Namespace) -> Comparison:
    names, file = list(args.names), args.reference
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
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
    settings = Settings(parse_tolerance(args.tolerance or TOLERANCE), args.seed, args.resamples)
    if file is not None:
        values, runs = references.read(Path(file)), _runs(names[0], args.results)
        metrics = None if args.metric is None else _metrics(args.metric)
        with _notes_of(runs):
            return comparison.compare_references((file, names[0]), values, runs, metrics, settings)
    a, b = (_runs(name, args.results) for name in names)
    with _notes_of([*a, *b]):
        metrics = _metrics(args.metric)
        return comparison.compare_runs((names[0], names[1]), a, b, metrics, settings)


@contextlib.contextmanager
def _notes_of(runs: Sequence[Run]) -> Iterator[None]:
    """Prints what is damaged before the error of a comparison that it may have caused."""
    try:
        yield
    except ConfigError:
        print_notes([note for run in runs for note in run.notes])
        raise


def _metrics(names: str | None) -> list[Metric]:
    wanted = chosen("--metric", "throughput" if names is None else names, METRICS)
    return [METRICS[name] for name in wanted]


def _runs(name: str, results: str) -> list[Run]:
    runs = read_runs(select([name], results).paths)
    if not runs:
        raise ConfigError(f"{name} has no run; start one with `hires run campaign={name}`")
    add_live_states(runs)
    return runs


def _write_reference(args: Namespace) -> int:
    if len(args.names) != 1 or args.reference:
        raise ConfigError("--write-reference takes one run or campaign, and nothing to compare to")
    tolerance = parse_tolerance(args.tolerance or TOLERANCE)
    runs = _runs(args.names[0], args.results)
    written = references.measured(runs, _metrics(args.metric), tolerance, args.cluster)
    if not written:
        raise ConfigError(f"{args.names[0]} has no complete run with such a number")
    path = Path(args.write_reference)
    total = references.write(path, written, reproduce_line(args.argv))
    if args.json:
        print_json({"file": str(path), "written": len(written), "held": total}, None)
    else:
        print(f"{path}: {len(written)} written, {total} in all")
    return 0


def _print(made: Comparison) -> None:
    (a, b), settings = made.names, made.settings
    print(f"A: {a}\nB: {b}")
    print(
        f"{100 * CONFIDENCE:g} % bootstrap intervals of B/A, {settings.resamples} "
        f"resamples, seed {settings.seed}\n"
    )
    for result in made.overall:
        metric = result.metric
        numbers = [Column(side, side, metric.unit, digits=2) for side in ("A", "B")]
        numbers += [Column("change", "change", "%", digits=1), Column("interval", "interval", "%")]
        columns: list[Column | str] = ["point", "verdict", *numbers, "tolerance", "drawn from"]
        better = "higher" if metric.higher_is_better else "lower"
        rows = [_row(metric, one) for one in made.results if one.metric is metric]
        title = f"{metric.name}: {metric.what}; {better} is better"
        print_table(title, columns, rows, ("verdict", "change"))
        if len(rows) > 1:
            mean = " (geometric mean of B/A)" if result.ratio else ""
            print(f"overall {metric.name}: {result.sentence()}{mean}\n")
    differences = [*made.config, *made.origin]
    if differences:
        print_table("What differs", ("key", "A", "B"), [[d.what, d.a, d.b] for d in differences])
    for note in made.notes:
        print(f"note: {note}")


def _row(metric: Metric, result: PointVerdict) -> list[str]:
    values = [metric.shown(value) for value in (result.a, result.b)]
    ends = "-" if result.interval is None else " to ".join(map(percent, result.interval))
    return [
        result.point,
        result.verdict if result.status != "worse" else f"{result.verdict} (worse)",
        *map(shown, values),
        percent(result.ratio),
        ends,
        shown(result.tolerance),
        result.why,
    ]
