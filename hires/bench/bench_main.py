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

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hires.bench.bench_tables import Result, Row, group_tables, page
from hires.core import streams
from hires.core.errors import INTERRUPTED, HiresError, error_object
from hires.core.store import provenance, reading
from hires.core.store.files import make_folder, write_atomically

KINDS = {
    "rows": "hires.bench.rows_bench",
    "comm": "hires.bench.comm_bench",
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
