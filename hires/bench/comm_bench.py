"""Measures messages through every library, beside raw ones: ``hires bench comm``.

Latency, bandwidth, bandwidth both ways and every collective, blocking and not, with all backends
and algorithms of hires.comm and raw libraries in turns, every result checked. Exit codes: 0 done,
1 a rank failed or a result is wrong, 2 bad options.

Examples:
  hires bench comm --quick
  hires bench comm --only all_reduce,latency --sizes 16..1MiB --out results/comm
  hires bench comm --table table.json
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from hires.bench.bench_output import Benchmark, Result, Results, names_of, option
from hires.bench.comm_tables import facts, tables
from hires.bench.message_operations import BENCHED
from hires.bench.sweep import (
    BASELINES,
    DTYPES,
    TABLE,
    WorldOptions,
    baselines_here,
    cells_of,
    former_rows,
    routes_here,
    sizes_of,
    sweep,
    words_of,
    wrong,
)
from hires.core.errors import ConfigError
from hires.plan.routes import parse_route
from hires.plan.table_gains import coarse
from hires.plan.tuning_table import TuningTable

USUAL = tuple(
    name for name in BENCHED if name not in ("all_gather", "reduce_scatter", "all_to_all")
)
"""Those with lists of tensors cost about what the others do, and are left to ``--only``."""
QUICK_SIZES = (16, 1 << 10, 1 << 16, 1 << 20, 1 << 24)
NOTES = """\
The sample of a call is its slowest rank; all ranks leave a fence together before it. Libraries run
in turns, in another order every round. A size is what a rank gives. Bandwidths: nccl-tests,
PERFORMANCE.md. `raw:mpi4py` and `raw:gloo` are the libraries without hires, `table`
is hires.comm with `comm=mix`."""


FINE, COARSE = "fine", "coarse"


def one_grain(flag: str, text: str) -> str:
    """Returns ``fine`` or ``coarse``; ConfigError: it is neither."""
    if text not in (FINE, COARSE):
        raise ConfigError(f"{flag} {text} is unknown; choose {FINE} or {COARSE}")
    return text


def ways_of(flag: str, text: str) -> tuple[str, ...]:
    """Returns routes and baselines; ConfigError: one is neither."""
    ways = words_of(flag, text)
    for way in ways:
        if way not in (*BASELINES, TABLE):
            parse_route(way)
    return ways


@dataclass(frozen=True)
class CommOptions(WorldOptions):
    """The options of ``hires bench comm``."""

    only: tuple[str, ...] = option(",".join(USUAL), "operations", parse=names_of([*BENCHED]))
    sizes: tuple[int, ...] = option("4..64MiB", "bytes, as 16,1KiB..1MiB", parse=sizes_of)
    dtypes: tuple[str, ...] = option("float32", "types of numbers", parse=names_of(DTYPES))
    modes: tuple[str, ...] = option(
        "blocking,async", "how calls are waited for", parse=names_of(("blocking", "async"))
    )
    ways: tuple[str, ...] = option(
        "", "routes and baselines; none: all that are here", parse=ways_of
    )
    table: str = option("", "tuning table of the way `table`")
    granularity: str = option(
        FINE, "fine: the table as it is; coarse: one backend for each operation", parse=one_grain
    )
    quick: bool = option(False, "few sizes, a tenth of the time")

    def __post_init__(self) -> None:
        if TABLE in self.ways and not self.table:
            raise ConfigError("--ways table needs --table FILE, as `hires tune comm` writes it")
        if self.granularity == COARSE and not self.table:
            raise ConfigError("--granularity coarse needs --table FILE, which it makes coarse")

    @property
    def entered(self) -> tuple[str, ...]:
        """The ways that take part."""
        usual = (
            *routes_here(self.device, self.has_mpi),
            *baselines_here(self.device, self.has_mpi),
        )
        return (*(self.ways or usual), *([TABLE] if self.table and TABLE not in self.ways else []))


def measure(options: CommOptions, former: Result | None) -> Results:
    """Yields all rows after each cell."""
    if options.quick:
        sizes = QUICK_SIZES if options.sizes == CommOptions.sizes else options.sizes
        short_s = options.seconds / 10
        options = dataclasses.replace(options, sizes=sizes, seconds=short_s)
    table = TuningTable.read(options.table) if options.table else None
    if table is not None and options.granularity == COARSE:
        table = coarse(table)
    shown: dict[str, Any] = {**dataclasses.asdict(options), "ways": options.entered}
    shown = {key: [*value] if isinstance(value, tuple) else value for key, value in shown.items()}
    if table is not None:  # the file may hold another one the next time
        shown["table_digest"] = table.digest
    modes = [mode == "blocking" for mode in options.modes]
    cells = cells_of(options.only, options.sizes, options.dtypes, modes)
    rows = former_rows(former, shown)
    yield from (result_of(shown, rows) for _ in sweep(options, cells, options.entered, rows, table))
    if rows:
        yield result_of(shown, rows)


def result_of(shown: dict[str, Any], rows: list[dict[str, Any]]) -> Result:
    """Returns the rows and their wrong results."""
    bad = wrong(rows)
    return {
        "ok": not bad,
        "options": shown,
        "wrong": bad,
        "rows": rows,
    }


BENCHMARK = Benchmark("comm", __doc__, CommOptions, measure, tables, NOTES, facts, resumes=True)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
