"""Runs a benchmark: its results as they come, its tables on screen and in a README.

``python -m hires.bench.bench_main FILE`` reads what the command line has described. The task's
``kind`` names the module that measures, which has:

    measure(task)             yields all that it has, as plain values, after each measurement
    tables(result)            what is shown; by default the rows of its groups
    finish(folder, result)    if any: writes more files of a whole result, returns what to say

``--out`` is written anew each time, so Ctrl-C, SIGTERM or an error loses nothing; the same command
on the same commit and machine resumes it. Exit codes: 0 done, 1 a rank failed or a result
is wrong, 2 bad options, 3 an impossible layout, 130 stopped.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from hires.core import streams
from hires.core.errors import INTERRUPTED, HiresError, error_object
from hires.core.store import provenance, reading
from hires.core.store.files import make_folder, write_atomically
from hires.core.units import aligned, gib, size

Row = dict[str, Any]
"""What was measured, as plain values: its ``name``, whether it is ``ok``, and what is ``wrong``;
``step_s`` (see :func:`hires.bench.race.spread`), or why it was ``not_run``."""
Result = dict[str, Any]
"""Plain values; ``groups`` are the rows of each table by its title."""
KINDS = {
    "rows": "hires.bench.rows_bench",
    "comm": "hires.bench.comm_bench",
    "broadcast": "hires.bench.broadcast_bench",
    "tune": "hires.bench.tune_comm",
    "calibrate": "hires.bench.calibrate_machine",
}
OPTION = "--out FOLDER"
FORCE = "--force"
SAME = ("command", "git", "hires", "torch", "hardware")
"""What a stopped measurement must share with the one that resumes it."""


def result_of(groups: Mapping[str, Sequence[Row]], facts: Sequence[str] = ()) -> Result:
    """Returns rows by table as a result; ``facts`` stand above the tables."""
    each = ((row, title) for title, rows in groups.items() for row in rows)
    wrong = [f"{row['name']} in {title}" for row, title in each if not row["ok"]]
    return {"ok": not wrong, "wrong": [*dict.fromkeys(wrong)], "facts": [*facts], "groups": groups}


def run(task: Mapping[str, Any], module: Any) -> int:
    """Measures a task, prints the result, keeps it in a folder, and returns the exit code."""
    folder = Path(task["out"]) if task["out"] else None
    origin = {"command": task["command"], "time": provenance.now(), **provenance.collect()}
    result: Result | None = None
    code, last, kind, why = 0, "", "", ""
    try:
        if folder is not None:
            make_folder(folder, OPTION)
        for measured in module.measure({**task, "before": _before(folder, task, origin)}):
            load = {"load_average": list(os.getloadavg())}
            result = {**origin, **load, **measured, "complete": False}
            _keep(folder, task, module, result)
        if result is not None:
            result["complete"] = True
            _keep(folder, task, module, result)
            code = 0 if result.get("ok", True) else 1
            if folder is not None and hasattr(module, "finish"):
                last = module.finish(folder, result)
    except HiresError as error:
        kind, why, code = type(error).__name__, str(error), error.exit_code
    except KeyboardInterrupt:
        kind, why, code = "Interrupted", "stopped by Ctrl-C or SIGTERM", INTERRUPTED
    if why:
        sys.stderr.write(f"hires: {why}\n")
    if result is not None:
        if not result["complete"]:
            sys.stderr.write("what was measured until then:\n")
        sys.stdout.write(_json(result) if task["json"] else page(result, _tables(module, result)))
    elif why and task["json"]:
        sys.stdout.write(_json(error_object(kind, why, code)))
    if last:
        (sys.stderr if task["json"] else sys.stdout).write(f"\n{last}\n")
    return code


def _tables(module: Any, result: Result) -> Any:
    return getattr(module, "tables", group_tables)(result)


def _before(folder: Path | None, task: Mapping[str, Any], origin: Result) -> dict[str, list[Row]]:
    # The rows by table of the same measurement, if it was stopped, or refused and now is forced.
    earlier = {} if folder is None else reading.read_json(folder / f"{task['name']}.json", [])
    if task.get("force") and earlier.get("refused"):
        earlier |= {"complete": False, "command": f"{earlier.get('command')} {FORCE}"}
    same = all(earlier.get(key) == origin[key] for key in SAME) and not earlier["complete"]
    return dict(earlier["groups"]) if same else {}


def _keep(folder: Path | None, task: Mapping[str, Any], module: Any, result: Result) -> None:
    if folder is not None:
        write_atomically(folder / f"{task['name']}.json", _json(result), option=OPTION)
        text = page(result, _tables(module, result), folder.name, str(task.get("notes", "")))
        write_atomically(folder / "README.md", text, option=OPTION)


def _json(result: Result) -> str:
    return json.dumps(result, indent=1) + "\n"


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


def main() -> int:
    """Measures what the file of the command line describes."""
    file = Path(sys.argv[1])
    task = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    streams.setup_log()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `timeout` sends it
    return run(task, import_module(KINDS[task["kind"]]))


if __name__ == "__main__":
    sys.exit(main())
