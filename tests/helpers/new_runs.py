"""Runs that were made and have not begun: what makes them, and how tests change them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from hires.core.store import files
from hires.core.store.rundir import RunDir

PLAN = {"world": 2, "placement": [], "totals": {}}
ARGV = ["hires", "run", "parallel=sp"]


def complete(run: RunDir) -> None:
    """Makes a run look complete, as its last rank would."""
    text = json.dumps({"state": "done", "attempt": run.attempt})
    (run.path / "record.json").write_text(text)


def left_by_a_killed_process(path: Path) -> Path:
    """Returns the hidden name of a path in a process of this machine that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    name = files.hidden(path).name.replace(f".{os.getpid()}-", f".{process.pid}-")
    return path.with_name(name)


def leftovers(folder: Path) -> list[Path]:
    """Returns the temporary files and folders below a folder."""
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
