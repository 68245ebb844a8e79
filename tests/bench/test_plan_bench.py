"""Does ``hires bench plan`` plan every size in a process of its own, and say what it missed?"""

from __future__ import annotations

import json

import pytest

from hires.bench.plan_bench import BENCHMARK, PlanOptions, judged
from hires.bench.plan_bench import measure as measure_plans
from hires.bench.plan_size import measure
from hires.core.config.model_config import ModelConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.nets.trace import trace_config
from tests.conftest import REPOSITORY


def test_every_size_is_planned_by_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    options = PlanOptions(model="resnet18", image=128, ranks=(), replica_ranks=(4, 16), repeats=2)
    *_, last = measure_plans(options)
    series = last["series"]
    assert series["replicas"] == []
    assert [row["ranks"] for row in series["one replica"]] == [4, 16]
    assert all(len(row["samples_s"]) == 2 for row in series["one replica"])
    # Torch alone, which the process does not need, would be larger.
    assert all(row["base_bytes"] < 100e6 for row in series["one replica"])


@pytest.mark.slow
def test_sizes_are_planned_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    folder = tmp_path / "kept"
    words = ["--image", "256", "--ranks", "64", "--replica-ranks", "4,16", "--repeats", "1"]
    # The smallest world takes milliseconds, so the growth after it means nothing here.
    assert BENCHMARK.main([*words, "--json", "--out", str(folder)]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    rows = found["series"]["replicas"] + found["series"]["one replica"]
    assert [row["ranks"] for row in rows] == [64, 4, 16]
    for row in rows:
        assert row["errors"] == []
        assert row["verdict"].startswith("deadlock-free, ")
        assert row["us_per_message"] == pytest.approx(row["cpu_s"] / row["planned_messages"] * 1e6)
        assert 0 < row["base_bytes"] <= row["peak_bytes"]
    assert json.loads((folder / "plan.json").read_text()) == found
    readme = (folder / "README.md").read_text()
    assert found["command"] in readme
    assert "aims up to 64 ranks: 20 s, 1 GB of memory, plan.json of 50 MB" in readme
    assert "not measured: worlds of 65 to 4096 ranks" in readme


@pytest.mark.slow
def test_plan_of_4096_ranks_is_stored_in_less_than_50_mb(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    [result] = measure_plans(PlanOptions(ranks=(4096,), replica_ranks=(), repeats=1))
    [world] = result["series"]["replicas"]
    assert (world["ranks"], world["replicas"], world["errors"]) == (4096, 64, [])
    assert world["plan_json_bytes"] < 50e6


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "100"], "--ranks 100 is not a number of replicas of 64 ranks; use 64"),
        (["--replica-ranks", "20"], "--replica-ranks 20 is not 4 times a square; use 16"),
        (["--ranks", "64,x"], "--ranks 64,x must be numbers with commas between, as 64,256"),
        (["--repeats", "0"], "must be at least 1"),
        (["--model", "vgg16"], "vgg16 is unknown"),
    ],
)
def test_bad_options_are_told_before_anything_is_planned(words, told, monkeypatch, capsys):
    monkeypatch.setattr("hires.bench.plan_bench.trace_config", lambda *_: pytest.fail("it began"))
    assert BENCHMARK.main(words) == 2
    assert told in capsys.readouterr().err


def test_process_that_fails_is_told(monkeypatch, capsys):
    monkeypatch.setattr("hires.bench.plan_bench.trace_config", lambda config: _Broken())
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    assert BENCHMARK.main(["--ranks", "64", "--replica-ranks", "4", "--repeats", "1"]) == 1
    assert "planning failed: " in capsys.readouterr().err


class _Broken:
    """A graph that cannot be read back."""

    def to_dict(self) -> dict[str, str]:
        return {"nodes": "none"}


def test_replicas_cost_nothing_more_to_plan():
    config = RunConfig(image=64, batch=4, model=ModelConfig(depth=18, classes=10))
    config.parallel = ParallelConfig(tiles=[2, 1], stages=2, replicas=1, microbatches=4)
    graph = trace_config(config).to_dict()
    one = measure(to_dict(config), graph)
    config.parallel.replicas, config.batch = 64, 256
    many = measure(to_dict(config), graph)
    assert (one["ranks"], many["ranks"]) == (3, 192)
    # Only the sum of gradients is new: it was none's on the last stage's one rank.
    assert many["messages"] == 64 * (one["messages"] + 1)
    assert many["cpu_s"] < 10 * one["cpu_s"]


OPTIONS = {"model": "resnet18", "image": 64}


def row(**change: object) -> dict:
    """A row that misses nothing."""
    cheap = {"plan_s": 1.0, "cpu_s": 1.0, "peak_bytes": 1e8, "plan_json_bytes": 1e6}
    facts = {"ranks": 64, "replicas": 1, "messages": 10, "planned_messages": 10.0, "errors": []}
    return {**cheap, **facts, "us_per_message": 10.0, **change}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"plan_s": 21.0}, ["plan_s"]),
        ({"peak_bytes": 1.1e9}, ["peak_bytes"]),
        ({"plan_json_bytes": 6e7}, ["plan_json_bytes"]),
        ({"us_per_message": 16.0}, ["growth"]),
        ({"errors": ["deadlock: rank 0"]}, ["verdict"]),
        ({"plan_s": 21.0, "ranks": 8192}, []),
    ],
)
def test_what_is_missed_is_named(change, missed):
    found = judged(OPTIONS, {"replicas": [row(), row(**change)]})
    assert found["series"]["replicas"][1]["missed"] == missed
    assert found["ok"] == (not missed)
    text = BENCHMARK.text(found)
    assert ("MISSED" in text) == bool(missed)
    assert f"{1.6 if missed == ['growth'] else 1:.2f}" in text.splitlines()[-1]


GROWTH = "cost of a message at most 1.5 times that in the smallest world"
COSTS = "20 s, 1 GB of memory, plan.json of 50 MB"


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([64, 4096], f"aims up to 4096 ranks: {COSTS}, {GROWTH}: reached"),
        (
            [64, 256],
            f"aims up to 256 ranks: {COSTS}, {GROWTH}: reached; "
            f"not measured: worlds of 257 to 4096 ranks",
        ),
        (
            [64],
            f"aims up to 64 ranks: {COSTS}: reached; "
            f"not measured: worlds of 65 to 4096 ranks, {GROWTH}",
        ),
        ([8192], f"aims: not measured: worlds of 1 to 4096 ranks, {GROWTH}"),
    ],
)
def test_only_what_was_measured_is_reached(sizes, told):
    rows = [row(ranks=ranks) for ranks in sizes]
    found = judged(OPTIONS, {"replicas": rows, "one replica": []})
    assert BENCHMARK.text(found).splitlines()[0] == told
