"""Every attempt gets its line in the index, whatever other processes write or die."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hires.core.errors import RunError
from hires.core.store import run_index
from tests.helpers.launches import ROOT
from tests.helpers.patience import PATIENCE_S

_WRITE = """
import sys
from pathlib import Path
from hires.core.store import run_index as index
who = sys.argv[2]
for n in range(20):
    line = {"schema": 1, "campaign": "c", "run": who, "attempt": n, "text": "x" * 3000}
    folder = Path(sys.argv[1]) / "c" / who / f"a{n}"
    folder.mkdir(parents=True)
    (folder / "exit.json").write_text('{"state": "done"}')
    index.append(Path(sys.argv[1]), line)
"""


_REBUILD = """
import json, sys, time
from pathlib import Path
from hires.core.store import run_index as index
results = Path(sys.argv[1])
for n in range(8):
    try:
        lines = [json.loads(line) for line in (results / index.FILE).read_text().splitlines()]
    except FileNotFoundError:
        lines = []
    time.sleep(0.01)
    index.replace(results, lines)
"""


_HOLD = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1] + "/.index.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def start(code, *args):
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def codes(processes):
    """Returns how processes ended, when all have."""
    for process in processes:
        process.communicate(timeout=PATIENCE_S)
    return [process.returncode for process in processes]


def lines(results):
    return [json.loads(line) for line in (results / run_index.FILE).read_text().splitlines()]


def test_rebuilding_meanwhile_loses_no_line(tmp_path):
    writers = [start(_WRITE, tmp_path, who) for who in "abcd"]
    builders = [start(_REBUILD, tmp_path) for _ in range(2)]
    assert codes([*writers, *builders]) == [0] * 6
    assert len(lines(tmp_path)) == 80
    found = {(line["run"], line["attempt"]) for line in lines(tmp_path)}
    assert found == {(who, n) for who in "abcd" for n in range(20)}
    assert {path.name for path in tmp_path.iterdir()} == {run_index.FILE, ".index.lock", "c"}


def test_attempts_that_ended_after_the_folders_were_read_keep_their_lines(tmp_path):
    def line(run, **more):
        return {"schema": 1, "campaign": "c", "run": run, "attempt": 0, **more}

    (tmp_path / "c" / "late" / "a0").mkdir(parents=True)
    (tmp_path / "c" / "late" / "a0" / "exit.json").write_text('{"state": "done"}')
    for run in ("gone", "late"):
        run_index.append(tmp_path, line(run))
    run_index.replace(tmp_path, [line("read")])
    assert lines(tmp_path) == [line("read"), line("late")]
    run_index.replace(tmp_path, [line("late", n=1)])
    assert lines(tmp_path) == [line("late", n=1)]


def test_lock_of_a_process_that_was_stopped_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(run_index, "PATIENCE_S", 0.2)
    holder = start(_HOLD, tmp_path)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="is locked by another process"):
            run_index.append(tmp_path, {"run": "a"})
    finally:
        holder.kill()
        holder.communicate()
    run_index.append(tmp_path, {"run": "a"})  # a lock dies with its process
    assert lines(tmp_path) == [{"run": "a"}]
    with pytest.raises(RunError, match="cannot write"):
        run_index.append(tmp_path / "none", {})
