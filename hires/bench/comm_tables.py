"""Shows what `hires bench comm` measured: medians side by side, and the fastest with its rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hires.bench.bench_noise import noise_facts
from hires.bench.bench_output import BenchTable, Result
from hires.bench.message_operations import BARRIER, BENCHED
from hires.bench.sweep import BASELINES
from hires.core.units import size

Row = dict[str, Any]


def tables(result: Result) -> list[BenchTable]:
    """Returns one table for each operation, mode, type and number of ranks."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in result["rows"]:
        mode = "" if row["blocking"] else ", issued and waited for"
        groups[f"{row['operation']}{mode}, {row['dtype']}, {row['ranks']} ranks, us"].append(row)
    made = []
    for title, rows in groups.items():
        ways = [*dict.fromkeys(way for row in rows for way in row["ways"])]
        ways.sort(key=lambda way: ":" in way and way not in BASELINES)  # narrow screens cut the end
        made.append(BenchTable(title, [_medians(row, ways) for row in rows]))
    best = [_fastest(row) for row in result["rows"] if row["blocking"] and _measured(row)]
    note = "The fastest way of all, raw libraries included."
    made.append(BenchTable("Fastest", best, note))
    return made


def facts(result: Result) -> list[str]:
    """Returns what stands above the tables."""
    options = result["options"]
    number = sum(one["count"] for row in result["rows"] for one in _measured(row).values())
    wrong = result["wrong"]
    lines = [
        f"ranks started by {options['start']}; {number:,} calls in {len(result['rows'])} cells",
        *noise_facts(result["rows"], options["rounds"]),
        f"results: {'WRONG: ' + '; '.join(wrong) if wrong else 'all right'}",
    ]
    missing: dict[str, dict[str, None]] = defaultdict(dict)
    for row in result["rows"]:
        for way, one in row["ways"].items():
            if one.get("missing"):
                missing[one["missing"]][f"{way} in {row['operation']}"] = None
    for why, ways in missing.items():
        more = f" and {len(ways) - 1} more" if len(ways) > 1 else ""
        lines.append(f"not measured: {next(iter(ways))}{more}: {why}")
    return lines


def _measured(row: Row) -> dict[str, dict[str, Any]]:
    return {way: one for way, one in row["ways"].items() if "p50_s" in one}


def _medians(row: Row, ways: Sequence[str]) -> dict[str, str]:
    measured = _measured(row)
    least = min((one["p50_s"] for one in measured.values()), default=0)
    cells = {"size": "-" if row["operation"] == BARRIER else size(row["bytes"])}
    for way in ways:
        if way not in measured:
            cells[way] = "-"
            continue
        one = measured[way]
        mark = "*" if one["p50_s"] == least else ""
        cells[way] = f"{one['p50_s'] * 1e6:.1f}{mark}" + " WRONG" * bool(one["wrong"])
    return cells


def _fastest(row: Row) -> dict[str, str]:
    measured = _measured(row)
    way, best = min(measured.items(), key=lambda item: item[1]["p50_s"])
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
