"""`make results` replaces the lines of what was measured, and leaves the others."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "results_table.py"
MACHINE = {"git": "0123456789ab", "hardware": {"cpu": "cpu", "cores": 2}, "load_average": [0.5]}
RATIO = {"median": 1.5, "p10": 1.4, "p90": 1.6, "count": 9}


def call(name, us):
    spread = {"median": us * 1e-6, "p10": us * 1e-6, "p90": us * 1e-6, "count": 7}
    return {"name": name, "bytes": 16, "operation": "all_reduce", "step_s": spread}


def test_lines_of_what_was_measured_are_replaced(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("results_table", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    results = {
        "layouts": {"groups": {"a": [{"name": "dp", "over_best": RATIO}, {"name": "pp gpipe"}]}},
        "comm": {"groups": {"a": [call("mpi", 9.0), call("shm", 8.0), call("raw:mpi4py", 1.0)]}},
        "choose": {"groups": {"a": [], "b": []}, "facts": ["noise", "predicted steps: well"]},
    }
    for name, result in results.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(json.dumps({**MACHINE, **result}))
    old = ["head", "| old | [comm](comm/README.md) |", "| other | [slide](slide/README.md) |"]
    (tmp_path / "README.md").write_text("\n".join(old) + "\n")
    script.main()
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert [lines[0], lines[3]] == [old[0], old[2]]
    assert ["9.0 and 1.0" in lines[1], "8.0 and 1.0" in lines[2]] == [True, True]
    [layouts, choose] = lines[4:]
    assert "| 1.50 | 9 | 1.40 to 1.60 | 0.5 | cpu, 2 cores; 01234567 | [layouts]" in layouts
    assert "2 cases | predicted steps: well |" in choose
