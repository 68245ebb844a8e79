"""Measures which backend, algorithm and segment carry each message fastest: ``hires tune comm``.

Every operation, size, type and number of ranks is measured over all routes in turns; the slowest
rank is the sample, the median counts. The table is written into the folder of --out, with the
medians for the cost model. On a noisy machine nothing is written, unless --force; a table that was
measured beside other programs is marked. After Ctrl-C the same command continues. Exit codes:
0 done, 1 a rank failed, a result is wrong or the machine is too noisy, 2 bad options.

Examples:
  hires tune comm
  hires tune comm --ranks 2,4 --dtypes float32,bfloat16 --out tuned
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.bench.bench_noise import disturbance, noise_facts, noise_of
from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, names_of, option
from hires.bench.comm_bench import ways_of
from hires.bench.sweep import (
    BASELINES,
    DTYPES,
    TABLE,
    WorldOptions,
    cells_of,
    former_rows,
    routes_here,
    sizes_of,
    sweep,
    wrong,
)
from hires.bench.table_choice import sums, table_of
from hires.core.errors import ConfigError
from hires.plan.route_choice import TUNED_FILE, TUNED_FOLDER
from hires.plan.table_gains import verdict
from hires.plan.tuning_table import DISTURBED, TuningTable

NAME = "tuning"
TUNED = (
    *("latency", "all_reduce", "reduce", "broadcast", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "all_to_all_single", "gather", "scatter", "barrier"),
)


def routes_of(flag: str, text: str) -> tuple[str, ...]:
    """Returns routes; ConfigError: one is none, or a baseline."""
    ways = ways_of(flag, text)
    for way in {TABLE, *BASELINES} & {*ways}:
        raise ConfigError(f"{flag} {way} is no route of hires.comm; leave it out")
    return ways


@dataclass(frozen=True)
class TuneOptions(WorldOptions):
    """The options of ``hires tune comm``."""

    only: tuple[str, ...] = option(",".join(TUNED), "operations", parse=names_of(TUNED))
    sizes: tuple[int, ...] = option("4..64MiB", "bytes, as 16,1KiB..1MiB", parse=sizes_of)
    dtypes: tuple[str, ...] = option(
        "float32", "types, of which operations that reduce have rules", parse=names_of(DTYPES)
    )
    routes: tuple[str, ...] = option("", "routes; none: all that are here", parse=routes_of)
    noise: float = option(0.1, "most spread of the medians of rounds, as a share of 1")
    force: bool = option(False, "write the table of a noisy machine, too, and mark it")
    write: str = option("", "file of the table; none: table.json in the folder of --out")

    @property
    def entered(self) -> tuple[str, ...]:
        """The routes that are measured."""
        return self.routes or routes_here(self.device, self.has_mpi)


def measure(options: TuneOptions, former: Result | None) -> Results:
    """Yields all rows and the rules that follow from them, after each cell."""
    shown: dict[str, Any] = {**dataclasses.asdict(options), "routes": options.entered}
    shown = {key: [*value] if isinstance(value, tuple) else value for key, value in shown.items()}
    limits = {key: shown.pop(key) for key in ("noise", "force", "write")}  # no measurement's
    rows = former_rows(former, shown)
    cells = cells_of(options.only, options.sizes, options.dtypes[:1], [True])
    cells += [
        cell
        for cell in cells_of(options.only, options.sizes, options.dtypes[1:], [True])
        if "reduce" in cell.operation
    ]
    for _ in sweep(options, cells, options.entered, rows):
        yield {"ok": True, "options": shown, "limits": limits, "rows": rows}
    yield judged_table(shown, limits, rows)


def judged_table(shown: Result, limits: Result, rows: list[Result]) -> Result:
    """Returns the result of a whole sweep: its table, what it gains, and why it is refused."""
    noise, bad = noise_of(rows), wrong(rows)
    default = next(way for way in shown["routes"] if ":" not in way)
    table = table_of(rows, {}, default)
    mixed, alone, used = sums(rows, table)
    refused = f"wrong results: {'; '.join(bad[:3])}" if bad else ""
    if noise > limits["noise"] and not refused and not limits["force"]:
        refused = (
            f"the medians of rounds differ by {100 * noise:.1f} %, more than "
            f"{100 * limits['noise']:g} %: other programs disturb the measurement; end them, leave "
            f"a core for each rank, use --rounds {2 * shown['rounds']}, or --force"
        )
    return {
        "ok": not refused,
        "options": shown,
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
    text = f"{path}: use it with\n  hires run comm=mix comm.table={path}\n(backends {backends})"
    if result["disturbed"]:
        text += (
            f"\nwarning: {result['disturbed']}; the table is marked: end other programs, remove "
        )
        text += f"{folder}, and measure again"
    for words in table.unmeasured:
        text += f"\nwarning: {words}; measure them with --sizes"
    if lacks := table.unruled:
        text += f"\nwarning: no rule has {', '.join(lacks)}, which {table.default} carries; "
        text += "measure all operations (without --only) for rules of them"
    return text


def tables(result: Result) -> list[BenchTable]:
    """Returns the rules, and the sum of the sweep by them beside each backend alone."""
    if "table" not in result:
        return []
    rules = [
        {
            key: str(rule.get(key, "any"))
            for key in ("operation", "ranks", "dtype", "bytes", "route")
        }
        for rule in result["table"]["rules"]
    ]
    total = result["sums"]["table"]
    rows = [
        {"way": way, "sum ms": f"{seconds * 1e3:.2f}", "over the table": f"{seconds / total:.2f}"}
        for way, seconds in result["sums"].items()
        if total
    ]
    return [
        BenchTable("Rules", rules),
        BenchTable("Sum of the sweep", rows, fact=result["verdict"]),
    ]


def facts(result: Result) -> list[str]:
    """Returns what stands above the tables."""
    if "table" not in result:
        return []
    limit = result["limits"]["noise"]
    return [
        *noise_facts(result["rows"], result["options"]["rounds"]),
        f"limit of the noise: {100 * limit:g} %",
        f"a route changes for a gain of {100 * max(0.02, 2 * result['noise']):.1f} % or more",
        *([f"REFUSED: {result['refused']}"] if result["refused"] else []),
    ]


BENCHMARK = Benchmark(
    NAME, __doc__, TuneOptions, measure, tables, "", facts, resumes=True, finish=write_table
)


def main() -> int:
    """Runs ``hires tune comm``, whose folder is ``comm-tuning`` unless --out names another."""
    words = sys.argv[1:]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", TUNED_FOLDER]
    return BENCHMARK.main(words, "hires tune comm")


if __name__ == "__main__":
    sys.exit(main())
