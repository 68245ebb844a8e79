"""Does the script of published figures predict Table 2.1 anew, and form the right ratios?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

from hires.cli.tracing import TorchProcess
from hires.engine.torch_server import reply_to

FILE = Path(__file__).resolve().parents[2] / "results/figures/figures.py"
SPEC = importlib.util.spec_from_file_location("figures", FILE)
figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(figures)


def test_points_are_predicted_on_the_machine_of_table_2_1_and_stand_beside_the_text(monkeypatch):
    # The process that traces is this one.
    monkeypatch.setattr(TorchProcess, "_ask", lambda self, what, question: reply_to(question))
    small = {
        "model": {"name": "mpi4dl_resnet", "depth": 11, "classes": 10},
        "image": 64,
        "batch": 4,
    }
    monkeypatch.setitem(figures.PUBLISHED, "table_2_1_run", {**small, "task": {"name": "infer"}})
    words = ("model.depth=11", "image=64", "batch=4", "precision=fp32,int8")
    rows = [*figures.predicted("fig2.4", words)]
    speeds = [figures.PUBLISHED["table_2_1"][name][1] for name in ("fp32", "int8")]
    assert [row["img_per_s"] for row in rows] == pytest.approx(speeds, rel=1e-6)
    assert all(0 < row["gb"] < 40 and row["fits"] for row in rows)
    rows += [{**row, "source": "measured", "img_per_s": 2.0 + n} for n, row in enumerate(rows)]
    points = figures.with_ratios(pd.DataFrame(rows))
    assert [*points["speed"]] == pytest.approx([1, speeds[1] / speeds[0], 1, 1.5])
    beside = figures.compared("2.4", points).set_index("value")
    assert beside.loc[6.5, "predicted"] == pytest.approx(speeds[1] / speeds[0])
    assert beside.loc[6.5, "measured"] == 1.5
    assert pd.isna(beside.loc[6.72, "measured"])  # is of 1024x1024 alone
