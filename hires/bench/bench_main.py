"""Runs a benchmark: its results as they come, its tables on screen and in a README.

``python -m hires.bench.bench_main TASK`` reads what the command line has described. The task's
``kind`` names the module that measures, which has:

    measure(task, previous)    yields all that it has, as plain values, after each measurement
    tables(result)             what is shown; facts(result) stands above, NOTES says how to read it
    finish(folder, result)     writes more files of a whole result, and returns what to say

The folder of ``--out`` is written anew each time, so Ctrl-C, SIGTERM or an error loses nothing; the
same command continues there. Exit codes: 0 done, 1 a rank failed or a result is wrong, 2 bad
options, 3 a layout cannot cut this network and image.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from hires.core import log as logs
from hires.core import terminal
from hires.core.errors import HiresError
from hires.core.screen_table import screen_lines
from hires.core.store import provenance, reading
from hires.core.store.files import make_folder, write_atomically
from hires.core.units import gib

KINDS = {
    "rows": "hires.bench.rows_bench",
    "comm": "hires.bench.comm_bench",
    "tune": "hires.bench.tune_comm",
    "calibrate": "hires.bench.calibrate_machine",
}
SCHEMA = 3
OPTION = "--out FOLDER"
ORIGIN = ("schema", "git", "hires", "torch", "python", "hardware", "options")
"""What must be the same before a benchmark continues an earlier result."""
NOT_MEASURED = ("kind", "name", "command", "notes", "out", "json", "timeout", "force", "write")
"""Of a task: what does not change its numbers."""

Result = dict[str, Any]
"""Plain values; ``ok`` is whether every check passed, in benchmarks that have checks."""
log = logging.getLogger(__name__)


class BenchTable(NamedTuple):
    """A table of a result; without rows it is not shown."""

    title: str
    rows: Sequence[Mapping[str, str]]
    """Cells by heading, the same headings in every row."""
    note: str = ""
    """What was measured or assumed besides; it stands below the table."""

    def lines(self, *, markdown: bool) -> list[str]:
        """Returns headings and rows; columns of numbers are flush right."""
        columns = zip(*(row.values() for row in self.rows), strict=True)
        sides = ["r" if all(c[:1] in "+-0123456789" for c in cells) else "l" for cells in columns]
        rows = [[*self.rows[0]], *([*row.values()] for row in self.rows)]
        if not markdown:
            lines, note = screen_lines(rows, terminal.columns(), "".join(sides), rows[0])
            return [*lines, *note]
        rule = ["---:" if side == "r" else "---" for side in sides]
        return [f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:])]


def run(task: Mapping[str, Any], module: Any) -> int:
    """Measures a task, prints the result, and keeps it in a folder.

    Returns the exit code: 0 done, 1 the result is not ok, 130 stopped, or that of an error.
    """
    folder = Path(task["out"]) if task["out"] else None
    options = {key: value for key, value in task.items() if key not in NOT_MEASURED}
    origin = {"schema": SCHEMA, "command": task["command"], "time": provenance.now()}
    origin |= {**provenance.collect(), "options": options}  # before the checkout moves on
    result: Result | None = None
    code, last = 0, ""
    try:
        for measured in module.measure(task, _previous(folder, task["name"], origin)):
            load = {"load_average": list(os.getloadavg())}
            result = {**origin, **load, **measured, "complete": False}
            _keep(folder, task, module, result)
        if result is not None:
            result["complete"] = True
            _keep(folder, task, module, result)
            if folder is not None and hasattr(module, "finish"):
                last = module.finish(folder, result)
        code = 0 if result is None or result.get("ok", True) else 1
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
        parts = ["\n".join([*_header(title, result), *(f"* {fact}" for fact in facts)]), notes]
    for table in (table for table in module.tables(result) if table.rows):
        lines = "\n".join(table.lines(markdown=markdown))
        parts += [f"## {table.title}\n\n{lines}" if markdown else f"{table.title}\n{lines}"]
        parts.append(table.note)
    return "\n\n".join(filter(None, parts)) + "\n"


def _keep(folder: Path | None, task: Mapping[str, Any], module: Any, result: Result) -> None:
    if folder is not None:
        make_folder(folder, OPTION)
        write_atomically(folder / f"{task['name']}.json", _json(result), option=OPTION)
        notes = str(task.get("notes") or getattr(module, "NOTES", ""))
        page = text(module, result, folder.name, notes)
        write_atomically(folder / "README.md", page, option=OPTION)


def _previous(folder: Path | None, name: str, origin: Result) -> Result | None:
    """Returns the result that a folder holds; None: none of this code, machine and options."""
    result = reading.read_json(folder / f"{name}.json") if folder is not None else None
    if not result:
        return None
    here = json.loads(_json(origin))
    if other := [key for key in ORIGIN if result.get(key) != here[key]]:
        log.info("%s has another %s: all of it is measured again", folder, ", ".join(other))
        return None
    return result


def _header(title: str, result: Result) -> list[str]:
    """Returns the first lines of a README: title, command, machine, commit and time."""
    hardware = result["hardware"]
    loads = ", ".join(f"{value:.2f}" for value in result["load_average"])
    versions = f"hires {result['hires']}, torch {result['torch']}, Python {result['python']}"
    return [
        f"# {title}",
        "",
        f"    {result['command']}",
        "",
        f"* machine: {hardware['cpu']}, {hardware['cores']} cores, {gib(hardware['memory'] or 0)}; "
        f"load average at the end {loads}",
        f"* commit: {result['git'] or 'no checkout'}; {versions}",
        f"* time: {result['time']}",
        *([] if result["complete"] else ["* stopped before its end"]),
    ]


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
