"""Does the script of published figures predict Table 2.1 anew, and form the right ratios?"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pandas as pd
import pytest

from hires.cli.tracing import TorchProcess
from hires.core.config.run_config import from_dict
from hires.engine.torch_server import reply_to

FILE = Path(__file__).resolve().parents[2] / "results/figures/figures.py"
SPEC = importlib.util.spec_from_file_location("figures", FILE)
figures = importlib.util.module_from_spec(SPEC)
sys.path.insert(0, str(FILE.parent))  # what is beside the script
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


def test_benchmarks_of_libraries_and_chains_stand_beside_the_text():
    saved = figures.tables_of("broadcast", [], [])[""].set_index(["on", "codec"])
    page = (FILE.parents[1] / "comm/broadcast/README.md").read_text()
    ranks = saved.loc[("4 ranks, 10Gbit", "bf16")]
    assert "mpi:segmented:1MiB+bf16 beside mpi 2.50 times (1.90 to 2.55), -60.0 %" in page
    assert ranks["over library"] == pytest.approx(60.0, abs=4)  # the page: the median of ratios
    assert saved.loc[("published", "theirs"), "over hops"] == 55.1
    sums = figures.tables_of("4.1", [], [])[""].set_index("bytes")
    for size, text in ((2**20, "pure NCCL"), (2**24, "torch's NCCL")):
        assert sums.loc[size, "text"] == text
        fastest = sums.loc[size, sums.loc[size, "fastest"]]
        assert fastest == min(sums.loc[size, ["gloo", "mpi", "shm"]])
    coarse, fine = figures.tables_of("poster", [], [])[""]["gain"]
    assert 1 <= coarse <= fine


def test_recorded_runs_replace_those_of_their_figure_and_are_drawn(monkeypatch, tmp_path):
    monkeypatch.setitem(figures.keep.__globals__, "MEASURED", tmp_path / "measured.csv")
    (tmp_path / "measured.csv").write_text(
        "figure,row,column,median,p10,p90,n\nother,a,b,1,1,1,1\n"
    )
    for median in (0.5, 0.25):
        rows = [
            {"row": row, "column": "rate 0.1", "median": median, "p10": 0.1, "p90": 0.6, "n": 9}
            for row in (64, 8)
        ]
        figures.keep("lr", rows)
    assert figures.kept("lr")["median"].tolist() == [0.25, 0.25]
    assert len(figures.kept("other")) == 1
    figures.draw("lr", figures.kept("lr"), tmp_path / "lr.svg")
    assert "rate 0.1" in (tmp_path / "lr.svg").read_text()
