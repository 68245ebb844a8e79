"""Runs a benchmark: its results as they come, its tables on screen and in a README.

``python -m hires.bench.bench_main FILE`` reads what the command line has described. The task's
``kind`` names the module that measures, which has:

    measure(task)             yields all that it has, as plain values, after each measurement
    tables(result)            what is shown; facts(result) stands above
    finish(folder, result)    if any: writes more files of a whole result, returns what to say

``--out`` is written anew each time, so Ctrl-C, SIGTERM or an error loses nothing. Exit codes: 0
done, 1 a rank failed or a result is wrong, 2 bad options, 3 an impossible layout, 130 stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from hires.core import log as logs
from hires.core.errors import HiresError
from hires.core.store import provenance
from hires.core.store.files import make_folder, write_atomically
from hires.core.text_table import aligned
from hires.core.units import gib

KINDS = {
    "rows": "hires.bench.rows_bench",
    "comm": "hires.bench.comm_bench",
    "tune": "hires.bench.tune_comm",
    "calibrate": "hires.bench.calibrate_machine",
}
OPTION = "--out FOLDER"
Result = dict[str, Any]
"""Plain values; ``ok`` is whether every check passed, in benchmarks that have checks."""


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


def run(task: Mapping[str, Any], module: Any) -> int:
    """Measures a task, prints the result, keeps it in a folder, and returns the exit code."""
    folder = Path(task["out"]) if task["out"] else None
    origin = {"command": task["command"], "time": provenance.now(), **provenance.collect()}
    result: Result | None = None
    code, last = 0, ""
    try:
        for measured in module.measure(task):
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
        sys.stderr.write(f"hires: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("hires: stopped by Ctrl-C or SIGTERM\n")
        code = 130
    if result is not None:
        if not result["complete"]:
            sys.stderr.write("what was measured until then:\n")
        sys.stdout.write(_json(result) if task["json"] else text(module, result))
    if last:
        (sys.stderr if task["json"] else sys.stdout).write(f"\n{last}\n")
    return code


def text(module: Any, result: Result, title: str = "", notes: str = "") -> str:
    """Returns the tables for the screen or, with a title, those of a README."""
    facts, markdown = module.facts(result), bool(title)
    parts = ["\n".join(facts)]
    if markdown:
        parts = ["\n".join([_header(title, result), *(f"* {fact}" for fact in facts)]), notes]
    for table in (table for table in module.tables(result) if table.rows):
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


def _keep(folder: Path | None, task: Mapping[str, Any], module: Any, result: Result) -> None:
    if folder is not None:
        make_folder(folder, OPTION)
        write_atomically(folder / f"{task['name']}.json", _json(result), option=OPTION)
        page = text(module, result, folder.name, str(task.get("notes", "")))
        write_atomically(folder / "README.md", page, option=OPTION)


def _json(result: Result) -> str:
    return json.dumps(result, indent=1) + "\n"


def main() -> int:
    """Measures what the file of the command line describes."""
    file = Path(sys.argv[1])
    task = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    logs.setup()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `timeout` sends it
    return run(task, import_module(KINDS[task["kind"]]))


if __name__ == "__main__":
    sys.exit(main())
