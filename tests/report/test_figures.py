"""Does the script of published figures predict Table 2.1 anew, and form the right ratios?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

from hires.cli.tracing import TorchProcess
from hires.core.config.run_config import from_dict
from hires.engine.torch_server import reply_to

FILE = Path(__file__).resolve().parents[2] / "results/figures/figures.py"
SPEC = importlib.util.spec_from_file_location("figures", FILE)
figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(figures)


def test_points_are_predicted_on_the_machine_of_table_2_1_and_stand_beside_the_text(monkeypatch):
    # The process that traces is this one.
    monkeypatch.setattr(TorchProcess, "_ask", lambda self, what, question: reply_to(question))
    from_dict(figures.PUBLISHED["table_2_1_run"])  # the published one is a config
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


def test_layouts_stand_beside_the_base_of_the_text(monkeypatch):
    monkeypatch.setattr(TorchProcess, "_ask", lambda self, what, question: reply_to(question))
    single = {"model": {"name": "resnet", "depth": 18}, "image": 64, "batch": 64}
    monkeypatch.setitem(figures.PUBLISHED, "table_2_1_run", {**single, "task": {"name": "infer"}})
    small = ["model.filters=24", "model.layers=3", "parallel.balance=null,[84,1]", "image=1024"]
    numbers = figures.tables_of("3.13", [], small)
    points = numbers[""].set_index("layout")
    gain = points.loc["sp+lp", "img_per_s"] / points.loc["pp", "img_per_s"]
    assert points.loc["sp+lp", "speed over the base"] == pytest.approx(gain)
    assert numbers["-published"].loc[0, "predicted"] == pytest.approx(max(gain, 1.0))


def test_edsr_scales_as_its_profile_of_all_reduces_says(monkeypatch, tmp_path):
    monkeypatch.setattr(TorchProcess, "_ask", lambda self, what, question: reply_to(question))
    words = ["batch=4,16,32", "parallel.replicas=1,4,8", "model.blocks=2", "model.width=64"]
    rows = pd.DataFrame(figures.scaling(words)).set_index(["library", "GPUs"])
    assert rows.xs(1, level="GPUs")["at the end"].tolist() == pytest.approx([11.34] * 3, rel=1e-6)
    assert (rows["beside"] >= rows["at the end"]).all()
    slow, fast = (rows.loc[(name, 8), "at the end"] for name in ("MPI", "MPI-Opt"))
    assert slow < fast < 8 * 11.34
    figures.draw("edsr", rows.reset_index(), tmp_path / "edsr.svg")
    assert all(f"EDSR, {name}" in (tmp_path / "edsr.svg").read_text() for name in ("MPI", "NCCL"))
