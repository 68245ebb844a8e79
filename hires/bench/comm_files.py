"""Writes what `hires bench comm` measured as CSV and figures."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from hires.bench.bench_output import OPTION, Result
from hires.bench.message_operations import BENCHED
from hires.bench.message_race import BenchCell, relative_noise
from hires.bench.ranks import run_program
from hires.core.python_command import module_command
from hires.core.store.files import write_atomically

COLUMNS = (
    *("operation", "bytes", "dtype", "blocking", "ranks", "ranks_per_node", "device", "way"),
    *("p50_us", "p99_us", "min_us", "algorithm_gb_per_s", "bus_gb_per_s", "calls", "noise"),
    *("wrong", "missing"),
)
DRAW_S = 300.0


def write_files(folder: Path, result: Result) -> str:
    """Writes ``comm.csv``, and ``comm-OPERATION.svg`` and ``.png`` for each operation."""
    if "rows" not in result:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in result["rows"]:
        for way, one in row["ways"].items():
            writer.writerow({**_where(row), "way": way, **_numbers(row, one)})
    write_atomically(folder / "comm.csv", text.getvalue(), option=OPTION)
    command = module_command("hires.report.comm_curves", str(folder))
    run_program("drawing", command, DRAW_S)
    return f"comm.csv and figures are in {folder}"


def _where(row: dict[str, Any]) -> dict[str, Any]:
    names = (*BenchCell._fields, "bytes", "ranks", "ranks_per_node", "device")
    return {name: row[name] for name in names if name in COLUMNS}


def _numbers(row: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    if "p50_s" not in one:
        return {"missing": one.get("missing", "")}
    rates = BENCHED[row["operation"]].bandwidths(row["bytes"], row["ranks"], one["p50_s"])
    return {
        **{f"{key}_us": f"{one[f'{key}_s'] * 1e6:.3f}" for key in ("p50", "p99", "min")},
        "algorithm_gb_per_s": f"{rates[0] / 1e9:.6g}",
        "bus_gb_per_s": f"{rates[1] / 1e9:.6g}",
        "calls": one["count"],
        "noise": f"{relative_noise(one['rounds_s']):.4f}",
        "wrong": one["wrong"],
    }
