"""Do many `hires run` at once get folders of their own, each complete?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL

ROOT = Path(__file__).resolve().parents[2]
COUNT = 60
"""Command lines that start at the same time; 200 were tried by hand, which takes minutes."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_at_once_leave_as_many_complete_folders(graph, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(graph.to_dict()))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_RANKS": "{}"}
    command = [sys.executable, "-m", "tests.helpers.fake_hires", "graph.json", "run", *SMALL]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen([*command, f"seed={seed}"], cwd=tmp_path, env=environ, **quiet)
        for seed in range(COUNT)
    ]
    assert [process.wait(800) for process in started] == [0] * COUNT
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/*/record.json")]
    assert len({record["run"] for record in records}) == COUNT
    assert {record["state"] for record in records} == {"done"}
    assert {record["attempt"] for record in records} == {0}
    assert not list(tmp_path.glob("results/*/.*"))
