"""Measures messages: ``hires bench comm`` beside raw libraries, ``hires tune comm`` for a table.

Latency, bandwidth and every collective, with all backends and algorithms of hires.comm in turns;
the slowest rank is the sample, every result is checked. The same command with --out continues
where it was stopped. Exit codes: 0 done, 1 a rank failed, a result is wrong or the machine is too
noisy for a table, 2 bad options.

  hires bench comm --quick
  hires bench comm --only all_reduce,latency --sizes 16..1MiB --out results/comm
  hires tune comm --ranks 2,4 --dtypes float32,bfloat16 --out tuned
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hires.bench.bench_output import Benchmark, BenchTable, Result, exit_code_of, parser_of
from hires.bench.message_noise import disturbance, noise_facts, noise_of
from hires.bench.message_sweep import (
    BASELINES,
    DTYPES,
    TABLE,
    Row,
    SweepOptions,
    baselines_here,
    cells_of,
    routes_here,
    sizes_of,
    starter_of,
    sweep,
    wrong_rows,
)
from hires.bench.messages import BARRIER, BENCHED
from hires.bench.tune_rules import margin_of, sums, table_of
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.units import size
from hires.plan.route_choice import TUNED_FILE, TUNED_FOLDER
from hires.plan.routes import parse_route
from hires.plan.table_gains import coarse, verdict
from hires.plan.tuning_table import DISTURBED, TuningTable

TUNED = (
    *("latency", "all_reduce", "reduce", "broadcast", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "all_to_all_single", "gather", "scatter", "barrier"),
)
"""Operations of which a table has rules; those with lists of tensors cost about the same."""
USUAL = ("bandwidth", "bidirectional", *TUNED)
QUICK_SIZES = "16,1KiB,64KiB,1MiB,16MiB"
NOTES = """\
The sample of a call is its slowest rank; all ranks leave a fence together before it. Libraries run
in turns, in another order every round. A size is what a rank contributes. Bandwidths: nccl-tests,
PERFORMANCE.md. `raw:mpi4py` and `raw:gloo` are the libraries without hires, `table` is hires.comm
with `comm=mix`."""


def parsed(program: str, words: Sequence[str], tunes: bool) -> argparse.Namespace:
    """Returns the options of a command; ConfigError: one makes no sense."""
    parser, add = _parser(program)
    usual = ",".join(TUNED if tunes else USUAL)
    add("--only", usual, "operations", _names_of(TUNED if tunes else [*BENCHED]))
    add("--routes", "", "routes; none: all that are here", _routes_of if tunes else _ways_of)
    if tunes:
        add("--noise", 0.1, "most spread of the medians of rounds, as a share of 1", float)
        add("--write", "", "file of the table; none: table.json in the folder of --out", str)
        parser.add_argument("--force", action="store_true", help="write a noisy table, marked")
        parser.set_defaults(out=Path(TUNED_FOLDER))
    else:
        add(
            "--modes",
            "blocking,async",
            "how calls are waited for",
            _names_of(["blocking", "async"]),
        )
        add("--table", "", "tuning table of the way `table`", str)
        text = "fine: the table as it is; coarse: one backend for each operation"
        add("--granularity", "fine", text, _names_of(["fine", "coarse"]))
        parser.add_argument("--quick", action="store_true", help="five sizes, a tenth of the time")
    options = parser.parse_args(words)
    if not tunes and TABLE in options.routes and not options.table:
        raise ConfigError("--routes table needs --table FILE, as `hires tune comm` writes it")
    if not tunes and options.granularity == ("coarse",) and not options.table:
        raise ConfigError("--granularity coarse needs --table FILE, which it makes coarse")
    if not tunes and options.quick:
        options.seconds /= 10
        whole = options.sizes == parser.get_default("sizes")
        options.sizes = sizes_of(QUICK_SIZES) if whole else options.sizes
    return options


def _parser(program: str) -> tuple[argparse.ArgumentParser, Callable[..., None]]:
    parser = parser_of(program, str(__doc__))

    def add(flag: str, default: Any, text: str, read: Callable[[str], Any]) -> None:
        value = read(default) if isinstance(default, str) else default
        shown = f"{text} (default: {default})" if default else text
        parser.add_argument(flag, type=_typed(flag, read), default=value, help=shown)

    add("--sizes", "4..64MiB", "bytes, as 16,1KiB..1MiB", sizes_of)
    add("--dtypes", "float32", "types of elements", _names_of(DTYPES))
    add("--ranks", "2", "numbers of ranks, as 2,4", _counts_of)
    add("--start", "auto", "what starts the ranks: an MPI, srun or torchrun", starter_of)
    add("--hosts", "", "machines of the ranks; none: this one", _words_of)
    add("--device", "cpu", "where the tensors are: cpu or cuda (on GPUs it was never run)", str)
    add("--rounds", 5, "turns of each library in a cell", _count)
    add("--seconds", 0.2, "of each library in a cell, all its turns together", float)
    return parser, add


def _typed(flag: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return read(text)
        except ConfigError as error:
            raise ConfigError(f"{flag} {text}: {error}") from None

    convert.__name__ = getattr(read, "__name__", "value").strip("_")
    return convert


def _names_of(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        for name in (names := _words_of(text)):
            if name not in choices:
                raise ConfigError(f"unknown {name!r}; {offer(name, choices)}")
        return tuple(name for name in choices if name in names)

    return read


def _words_of(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, text.split(","))))


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise ConfigError("it must be a whole number above 0")
    return int(text)


def _counts_of(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) > 1 for part in text.split(",")):
        raise ConfigError("it must be numbers above 1 with commas between, as 2,4")
    return tuple(sorted({int(part) for part in text.split(",")}))


def _ways_of(text: str) -> tuple[str, ...]:
    for way in (ways := _words_of(text)):
        if way not in (*BASELINES, TABLE):
            parse_route(way)
    return ways


def _routes_of(text: str) -> tuple[str, ...]:
    routes = _ways_of(text)
    for way in {TABLE, *BASELINES} & {*routes}:
        raise ConfigError(f"{way} is no route of hires.comm; leave it out")
    if routes and all(":" in route for route in routes):
        raise ConfigError("a table needs a backend alone, for what no rule has: add gloo or mpi")
    return routes


def bench(words: Sequence[str]) -> int:
    """Measures messages beside raw libraries."""

    def run(command: str) -> int:
        options = parsed("hires bench comm", words, tunes=False)
        table = TuningTable.read(options.table) if options.table else None
        if table is not None and options.granularity == ("coarse",):
            table = coarse(table)
        where = _where(options)
        here = (*routes_here(where.device, where.has_mpi), *baselines_here(where.has_mpi))
        ways = tuple(dict.fromkeys((*(options.routes or here), *([TABLE] if table else []))))
        modes = [mode == "blocking" for mode in options.modes]
        cells = cells_of(options.only, options.sizes, options.dtypes, modes)
        shown = {**_shown(options, ways), "table": table.digest if table else ""}

        def measure(previous: Result | None) -> Iterator[Result]:
            rows = rows_to_resume(previous, shown)
            for _ in sweep(where, cells, ways, rows, table):
                yield result_of(shown, rows)
            yield result_of(shown, rows)

        made = Benchmark("comm", command, measure, comm_tables, NOTES, comm_facts)
        return made.run(options.out, as_json=options.json)

    return exit_code_of("hires bench comm", words, run)


def tune(words: Sequence[str]) -> int:
    """Measures routes, and writes the table of ``comm=mix``."""

    def run(command: str) -> int:
        options = parsed("hires tune comm", words, tunes=True)
        where = _where(options)
        routes = options.routes or routes_here(where.device, where.has_mpi)
        cells = cells_of(options.only, options.sizes, options.dtypes[:1], [True])
        others = cells_of(options.only, options.sizes, options.dtypes[1:], [True])
        cells += [cell for cell in others if "reduce" in cell.operation]
        shown = _shown(options, routes)
        limits = {"noise": options.noise, "force": options.force, "write": options.write}

        def measure(previous: Result | None) -> Iterator[Result]:
            rows = rows_to_resume(previous, shown)
            for _ in sweep(where, cells, routes, rows):
                yield {"ok": True, "options": shown, "limits": limits, "rows": rows}
            yield judged_table(shown, limits, rows)

        made = Benchmark("tuning", command, measure, tune_tables, "", tune_facts, write_table)
        return made.run(options.out, as_json=options.json)

    return exit_code_of("hires tune comm", words, run)


def _where(options: argparse.Namespace) -> SweepOptions:
    return SweepOptions(**{name: getattr(options, name) for name in SweepOptions.__annotations__})


def _shown(options: argparse.Namespace, ways: Sequence[str]) -> dict[str, Any]:
    names = "start", "hosts", "device", "ranks", "rounds", "seconds", "only", "sizes", "dtypes"
    values = {name: getattr(options, name) for name in names} | {"routes": ways}
    return {key: [*v] if isinstance(v, tuple) else v for key, v in values.items()}


def rows_to_resume(previous: Result | None, options: dict[str, Any]) -> list[Row]:
    """Returns the rows of an earlier result that was measured alike, to go on with them."""
    alike = previous is not None and previous.get("options") == options
    return [*previous.get("rows", [])] if alike and previous else []


def result_of(options: dict[str, Any], rows: list[Row]) -> Result:
    """Returns the rows and their wrong results."""
    wrong = wrong_rows(rows)
    return {"ok": not wrong, "options": options, "wrong": wrong, "rows": rows}


def comm_facts(result: Result) -> list[str]:
    """Returns what stands above the tables."""
    wrong = result["wrong"]
    missing: dict[str, dict[str, None]] = defaultdict(dict)
    for row in result["rows"]:
        for way, one in row["ways"].items():
            if one.get("missing"):
                missing[one["missing"]][f"{way} in {row['operation']}"] = None
    lines = [f"not measured: {', '.join([*ways][:3])}: {why}" for why, ways in missing.items()]
    results = f"WRONG: {'; '.join(wrong)}" if wrong else "all right"
    noise = noise_facts(result["rows"], result["options"]["rounds"])
    return [f"ranks started by {result['options']['start']}", *noise, f"results: {results}", *lines]


def comm_tables(result: Result) -> list[BenchTable]:
    """Returns a table for each operation, mode, type and number of ranks, and the fastest ways."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in result["rows"]:
        mode = "" if row["blocking"] else ", issued and waited for"
        groups[f"{row['operation']}{mode}, {row['dtype']}, {row['ranks']} ranks, us"].append(row)
    made = []
    for title, rows in groups.items():
        ways = [*dict.fromkeys(way for row in rows for way in row["ways"])]
        ways.sort(key=lambda way: ":" in way and way not in BASELINES)  # narrow screens cut the end
        made.append(BenchTable(title, [_medians(row, ways) for row in rows]))
    best = [_fastest(row) for row in result["rows"] if row["blocking"] and _right(row)]
    return [*made, BenchTable("Fastest", best, "The fastest way of all, raw libraries included.")]


def _right(row: Row) -> dict[str, dict[str, Any]]:
    return {way: one for way, one in row["ways"].items() if "p50_s" in one and not one["wrong"]}


def _medians(row: Row, ways: Sequence[str]) -> dict[str, str]:
    least = min((one["p50_s"] for one in _right(row).values()), default=0)
    cells = {"size": "-" if row["operation"] == BARRIER else size(row["bytes"])}
    for way in ways:
        one = row["ways"].get(way, {})
        cells[way] = "WRONG" if one.get("wrong") else "-"
        if way in _right(row):
            cells[way] = f"{one['p50_s'] * 1e6:.1f}{'*' if one['p50_s'] == least else ''}"
    return cells


def _fastest(row: Row) -> dict[str, str]:
    way, best = min(_right(row).items(), key=lambda item: item[1]["p50_s"])
    rates = BENCHED[row["operation"]].bandwidths(row["bytes"], row["ranks"], best["p50_s"])
    return {
        "operation": row["operation"],
        "ranks": str(row["ranks"]),
        "size": size(row["bytes"]),
        "way": way,
        "p50 us": f"{best['p50_s'] * 1e6:.1f}",
        "p99 us": f"{best['p99_s'] * 1e6:.1f}",
        "alg GB/s": f"{rates[0] / 1e9:.3f}",
        "bus GB/s": f"{rates[1] / 1e9:.3f}",
        "n": str(best["count"]),
    }


def judged_table(options: dict[str, Any], limits: dict[str, Any], rows: list[Row]) -> Result:
    """Returns the result of a whole sweep: its table, what it gains, and why it is refused."""
    noise, wrong = noise_of(rows), wrong_rows(rows)
    table = table_of(rows, {}, next(way for way in options["routes"] if ":" not in way))
    mixed, alone, used = sums(rows, table)
    refused = f"wrong results: {'; '.join(wrong[:3])}" if wrong else ""
    if noise > limits["noise"] and not refused and not limits["force"]:
        refused = (
            f"the medians of rounds differ by {100 * noise:.1f} %, more than "
            f"{100 * limits['noise']:g} %: other programs disturb the measurement; end them, leave "
            f"a core for each rank, use --rounds {2 * options['rounds']}, or --force"
        )
    return {
        "ok": not refused,
        "options": options,
        "limits": limits,
        "refused": refused,
        "noise": noise,
        "disturbed": disturbance(rows),
        "sums": {"table": mixed, **alone},
        "used": used,
        "verdict": verdict(table),
        "table": table.to_dict(),
        "rows": rows,
    }


def write_table(folder: Path, result: Result) -> str:
    """Writes the table if it is good; returns how it is used."""
    if result["refused"]:
        return f"no table was written: {result['refused']}"
    made = {
        "machine": f"{result['hardware']['cpu']}, {result['hardware']['cores']} cores",
        "date": result["time"],
        "commit": result["git"] or "unknown",
        "command": result["command"],
        "noise": round(result["noise"], 4),
    }
    if result["noise"] > result["limits"]["noise"]:
        made["forced"] = True
    if result["disturbed"]:
        made[DISTURBED] = result["disturbed"]
    path = Path(result["limits"]["write"] or folder / TUNED_FILE)
    table = TuningTable.from_dict({**result["table"], "made": made})
    table.write(path)
    backends = ",".join(result["used"])
    lines = [f"{path}: use it with\n  hires run comm=mix comm.table={path}\n(backends {backends})"]
    if result["disturbed"]:
        remedy = f"end other programs, remove {folder}, and measure again"
        lines.append(f"warning: {result['disturbed']}; the table is marked: {remedy}")
    lines += [f"warning: {words}; measure them with --sizes" for words in table.unmeasured]
    if lacks := table.unruled:
        lines.append(
            f"warning: no rule has {', '.join(lacks)}, which {table.default} carries; "
            f"measure all operations (without --only) for rules of them"
        )
    return "\n".join(lines)


def tune_tables(result: Result) -> list[BenchTable]:
    """Returns the rules, and the sum of the sweep by them beside each backend alone."""
    if "table" not in result:
        return []
    names = ("operation", "ranks", "dtype", "bytes", "route")
    rules = [{key: str(rule.get(key, "any")) for key in names} for rule in result["table"]["rules"]]
    total = result["sums"]["table"]
    rows = [
        {"way": way, "sum ms": f"{seconds * 1e3:.2f}", "over the table": f"{seconds / total:.2f}"}
        for way, seconds in result["sums"].items()
        if total
    ]
    return [BenchTable("Rules", rules), BenchTable("Sum of the sweep", rows, result["verdict"])]


def tune_facts(result: Result) -> list[str]:
    """Returns what stands above the tables."""
    if "table" not in result:
        return []
    return [
        *noise_facts(result["rows"], result["options"]["rounds"]),
        f"limit of the noise: {100 * result['limits']['noise']:g} %",
        f"a route changes for a gain of {100 * margin_of(result['noise']):.1f} % or more",
        *([f"REFUSED: {result['refused']}"] if result["refused"] else []),
    ]


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    sys.exit(bench(words) if command == "bench" else tune(words))
