"""Compares many drawn layouts with one process in float64: ``hires bench parity``.

``python -m hires.bench.parity_bench`` draws layouts and networks, runs one step of each on real
ranks in float64, compares it with the user's plain module in one process, and writes a table with
the largest relative error of every row. Exit codes: 0 all equal, 1 some row is not, 2 bad options.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hires.bench.bench_output import (
    BenchTable,
    Form,
    Progress,
    Result,
    add_output,
    origin,
    run_benchmark,
)
from hires.bench.parity_rows import overrides, rows
from hires.bench.ranks import run_ranks
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError, HiresError
from hires.core.store import file_names
from hires.engine.build import build_rank
from hires.engine.verify import TOLERANCE, verify_rank
from hires.nets.trace import trace_config
from hires.plan.plan import Plan
from hires.plan.planner import make_plan

Row = dict[str, Any]

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the table; returns the exit code."""
    return run_benchmark(FORM, argv, _parser().parse_args, _measure)


def table(
    count: int,
    seed: int,
    timeout_s: float,
    on_row: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Returns one dict of plain values for each of ``count`` rows.

    Args:
        count: rows to draw.
        seed: decides them.
        timeout_s: after this time a row has failed.
        on_row: called with all rows so far after each new one.
    """
    plans: list[Plan] = []

    def accept(config: RunConfig) -> bool:
        plan = make_plan(config, trace_config(config))
        if plan.ok:
            plans.append(plan)
        return plan.ok

    made = []
    for number, config in enumerate(rows(count, seed, accept)):
        start = time.monotonic()
        made.append(check(config, plans[number], timeout_s))
        log.info(
            "row %d of %d: %s, %d ranks, %.0f s, error %s",
            *(number + 1, count, config.model.name, plans[number].world),
            *(time.monotonic() - start, made[-1]["max_rel_err"]),
        )
        on_row(made)
    return made


def check(config: RunConfig, plan: Plan, timeout_s: float) -> Row:
    """Returns what a layout's own ranks found when they compared a step with one process."""
    row: Row = {
        "network": config.model.name,
        "image": list(config.image),
        "task": config.task.name,
        "ranks": plan.world,
        "tiles": config.parallel.tiles,
        **{key: getattr(config.parallel, key) for key in KEYS},
        "fuse": config.parallel.halo.fuse,
        "overlap": config.parallel.halo.overlap,
        "checkpoint": config.memory.checkpoint,
        "verdict": plan.verdict,
        "again": shlex.join(["hires", "verify", *overrides(config)]),
    }
    try:
        with tempfile.TemporaryDirectory(prefix="hires-parity-") as folder:
            given = to_dict(config), plan.to_dict(), folder
            answer = run_ranks(verify_one, plan.world, timeout_s, *given)
    except HiresError as error:
        return {**row, "max_rel_err": None, "errors": {}, "ok": False, "failure": str(error)}
    return {**row, **answer}


def verify_one(rank: int, config: dict[str, Any], plan: dict[str, Any], folder: str) -> Row | None:
    """Runs and compares one layout's step; returns the answer on rank 0."""
    settings = from_dict(config)
    engine = build_rank(settings, Plan.from_dict(plan), rank, 1)
    verify_rank(engine, settings, Path(folder))
    if rank != 0:
        return None
    answer: Row = json.loads((Path(folder) / file_names.VERIFY).read_text(encoding="utf-8"))
    return answer


def _measure(parsed: argparse.Namespace, command: str, progress: Progress) -> Result:
    """Returns all rows, and whether they are equal.

    Raises:
        ConfigError: an option makes no sense.
    """
    if parsed.rows < 1 or parsed.timeout <= 0:
        raise ConfigError("--rows must be at least 1, and --timeout above 0")

    def kept(rows: list[Row]) -> Result:
        equal = all(row["ok"] for row in rows)
        return {**origin(command, tolerance=TOLERANCE, ok=equal), "rows": rows}

    def keep_rows(rows: list[Row]) -> None:
        progress.update(kept(rows))

    return kept(table(parsed.rows, parsed.seed, parsed.timeout, keep_rows))


KEYS = (
    *("stages", "spatial_stages", "directions", "pairs", "schedule", "microbatches"),
    *("local_dp", "replicas"),
)
HEADINGS = (
    *("network", "image", "task", "ranks", "tiles", "stages", "dirs", "pairs", "schedule", "mbs"),
    *("local_dp", "replicas", "fuse", "overlap", "checkpoint", "largest error"),
)
NOTES = """\
Each row is one step (forward, loss, backward, optimiser, running statistics) of a layout on real
ranks in float64, compared with the plain module in one process over the same microbatches. The
error is the largest difference of any tensor, relative to the largest value in it; the bound stands
above. Rows are drawn so that values meet in as many pairs as possible; none is picked by hand.
`again` in parity.json is the line that makes a row again."""


def _facts(found: Result) -> list[str]:
    rows = found["rows"]
    worst = max((row["max_rel_err"] for row in rows if row["max_rel_err"] is not None), default=0)
    equal = sum(row["ok"] for row in rows)
    return [
        f"{equal} of {len(rows)} rows are equal (allowed: {found['tolerance']:.0e}); the largest "
        f"error of all is {worst:.1e}"
    ]


def _tables(found: Result) -> list[BenchTable]:
    title = "Every layout against one process"
    return [BenchTable(title, HEADINGS, [*map(_cells, found["rows"])])]


def _cells(row: Row) -> list[str]:
    """Returns a row as text."""
    error = row["max_rel_err"]
    height, width = row["image"]
    keys = ("directions", "pairs", "schedule", "microbatches", "local_dp", "replicas")
    return [
        *(row["network"], f"{height}x{width}", row["task"], str(row["ranks"])),
        *(str(row["tiles"]).replace(" ", ""), str(row["stages"])),
        *(str(row[key]) for key in keys),
        *(str(row["fuse"]), row["overlap"], row["checkpoint"]),
        f"FAILED: {row['failure']}" if error is None else f"{error:.1e}",
    ]


FORM = Form("parity", _tables, NOTES, _facts)


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="hires bench parity", description=__doc__)
    add = parser.add_argument
    add("--rows", type=int, default=64, help="layouts to draw (default: %(default)s)")
    add("--seed", type=int, default=0, help="decides which (default: %(default)s)")
    add("--timeout", type=float, default=300, help="seconds for one row (default: %(default)s)")
    add_output(parser, "parity")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
