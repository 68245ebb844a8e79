"""Draws the tables of benchmarks, on screen and in Markdown: a row a line, or messages by size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hires.core.units import aligned, gib, size

Row = dict[str, Any]
"""What was measured, as plain values: its ``name``, whether it is ``ok``, and what is ``wrong``;
``step_s`` (see :func:`hires.bench.race.spread`), or why it was ``not_run``."""
Result = dict[str, Any]
"""Plain values; ``groups`` are the rows of each table by its title."""


class BenchTable(NamedTuple):
    """A table of a result, not shown without rows; they have the same headings, and a note."""

    title: str
    rows: Sequence[Mapping[str, str]]
    note: str = ""

    def lines(self, *, markdown: bool) -> list[str]:
        """Returns headings and rows; columns of numbers are flush right."""
        columns = zip(*(row.values() for row in self.rows), strict=True)
        sides = ["r" if all(c[:1] in "+-0123456789" for c in cells) else "l" for cells in columns]
        rows = [[*self.rows[0]], *([*row.values()] for row in self.rows)]
        if not markdown:
            return aligned(rows, "".join(sides))
        rule = ["---:" if side == "r" else "---" for side in sides]
        return [f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:])]


def page(result: Result, tables: Sequence[BenchTable], title: str = "", notes: str = "") -> str:
    """Returns facts and tables for the screen or, with a title, those of a README."""
    wrong = [f"WRONG: {', '.join(result['wrong'])}"] if result.get("wrong") else []
    facts, markdown = [*wrong, *result.get("facts", [])], bool(title)
    parts = ["\n".join(facts)]
    if markdown:
        parts = ["\n".join([_header(title, result), *(f"* {fact}" for fact in facts)]), notes]
    for table in (table for table in tables if table.rows):
        lines = "\n".join(table.lines(markdown=markdown))
        parts += [f"## {table.title}\n\n{lines}" if markdown else f"{table.title}\n{lines}"]
        parts.append(table.note)
    return "\n\n".join(filter(None, parts)) + "\n"


def _header(title: str, result: Result) -> str:
    hardware = result["hardware"]
    loads = ", ".join(f"{value:.2f}" for value in result["load_average"])
    versions = f"hires {result['hires']}, torch {result['torch']}, Python {result['python']}"
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {gib(hardware['memory'] or 0)}"
    state = "" if result["complete"] else "\n* stopped before its end"
    return (
        f"# {title}\n\n    {result['command']}\n\n"
        f"* machine: {machine}; load average at the end {loads}\n"
        f"* commit: {result['git'] or 'no checkout'}; {versions}\n* time: {result['time']}{state}"
    )


def group_tables(result: Result) -> list[BenchTable]:
    """Returns the table of each group of rows."""
    drawn = [_messages if "bytes" in rows[0] else row_table for rows in result["groups"].values()]
    return [draw(*group) for draw, group in zip(drawn, result["groups"].items(), strict=True)]


def row_table(title: str, rows: Sequence[Row]) -> BenchTable:
    """Returns the table of a group of rows; columns that no row has are left out."""
    cells = [_cells(row) for row in rows]
    keep = [head for head in cells[0] if head in ("row", "n") or {c[head] for c in cells} != {"-"}]
    return BenchTable(title, [{head: row[head] for head in keep} for row in cells])


def _cells(row: Row) -> dict[str, str]:
    step_s, check, predicted_s = row.get("step_s"), row.get("check"), row["predicted_s"]
    state = f"not run: {row['not_run']}" if "not_run" in row else ""
    state = f"WRONG: {row['wrong']}" if row.get("wrong") else state
    kernels = ", ".join(f"{count} {kind}" for kind, count in row.get("kernels", {}).items())
    ms = {key: f"{step_s[key] * 1e3:.1f}" if step_s else "-" for key in ("median", "p10", "p90")}
    return {
        "row": row["name"],
        "ranks": str(row["ranks"]) if row["threads"] == 1 else f"{row['threads']} threads",
        "images": str(row["images"]),
        "step ms": ms["median"],
        "p10": ms["p10"],
        "p90": ms["p90"],
        "n": str(step_s["count"]) if step_s else "-",
        "predicted ms": f"{predicted_s * 1e3:.1f}" if predicted_s else "-",
        "images/s": f"{row['images_per_s']:.3f}" if step_s else "-",
        "speed-up": _ratio_text(row.get("speedup")),
        "over the fastest other": _ratio_text(row.get("over_best")),
        "cores": f"{row['cores']:.2f}" if step_s else "-",
        "errors": f"{check['value']:.0e} {check['exact']:.0e}" if check else "-",
        "kernels": kernels or "-",
        "what": ". ".join(filter(None, (state, row["what"]))) or "-",
    }


def _ratio_text(value: Mapping[str, float] | None) -> str:
    return f"{value['median']:.2f} ({value['p10']:.2f}-{value['p90']:.2f})" if value else "-"


def _messages(title: str, rows: Sequence[Row]) -> BenchTable:
    # A line for each size: the fastest way with its bandwidths, and the median of every way.
    ways = sorted(dict.fromkeys(row["name"] for row in rows), key=_is_variant)
    by_size = itertools.groupby(rows, key=lambda row: int(row["num_bytes"]))
    return BenchTable(f"{title}, us", [_message_cells([*some], ways) for _, some in by_size])


def _is_variant(way: str) -> bool:
    # Whether it is an algorithm on a backend: narrow screens cut the end.
    return ":" in way and not way.startswith("raw:")


def _message_cells(rows: Sequence[Row], ways: Sequence[str]) -> dict[str, str]:
    right = {row["name"]: row for row in rows if row["ok"] and "step_s" in row}
    us = {name: f"{row['step_s']['median'] * 1e6:.1f}" for name, row in right.items()}
    wrong = {row["name"]: "WRONG" for row in rows if not row["ok"]}
    fastest = min(us, key=lambda name: float(us[name]), default="-")
    num_bytes, values = rows[0]["bytes"], ["-"] * 4  # 0: of a barrier
    cells = {"size": size(num_bytes) if num_bytes else "-", "fastest": fastest}
    if best := right.get(fastest):
        rates = [f"{rate / 1e9:.3f}" if rate else "-" for rate in best["bytes_per_s"]]
        values = [f"{best['step_s']['p99'] * 1e6:.1f}", *rates, str(best["step_s"]["count"])]
    cells |= dict(zip(("p99", "alg GB/s", "bus GB/s", "n"), values, strict=True))
    return {**cells, **{way: {**us, **wrong}.get(way, "-") for way in ways}}
