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


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "count", [pytest.param(60, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.wide)]
)
def test_runs_at_once_leave_as_many_complete_folders(graph, tmp_path, count):
    (tmp_path / "graph.json").write_text(json.dumps(graph.to_dict()))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HIRES_FAKE_RANKS": "{}"}
    command = [sys.executable, "-m", "tests.helpers.fake_hires", "graph.json", "run", *SMALL]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen([*command, f"seed={seed}"], cwd=tmp_path, env=environ, **quiet)
        for seed in range(count)
    ]
    assert [process.wait(800) for process in started] == [0] * count
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/*/record.json")]
    assert len({record["run"] for record in records}) == count
    assert {record["state"] for record in records} == {"done"}
    assert {record["attempt"] for record in records} == {0}
    assert len({record["provenance"]["argv"][-1] for record in records}) == count
    assert len(list(tmp_path.glob("results/*/*/a*/exit.json"))) == count
    assert not list(tmp_path.glob("results/*/.*"))
