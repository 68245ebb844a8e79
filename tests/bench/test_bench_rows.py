"""Rows are data: composed as a run is, planned, checked, measured in turns, kept as they come."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest
import yaml

from hires.bench import bench_main, rows_bench
from hires.bench.bench_main import group_tables, row_table
from hires.bench.bench_rows import BenchRow, planned, row_of, with_small
from hires.bench.check import count_kernels, ran_as
from hires.bench.race import Samples
from hires.bench.rows_bench import (
    choice_facts,
    kendall_tau,
    measured_rows,
    of_different_shapes,
    with_inputs,
)
from hires.cli.verbs.verb_bench import PARSER, composed_task
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError, PlanError
from hires.plan.search.candidates import Candidate, LayoutShape
from tests.helpers.bench_jobs import forked
from tests.helpers.layouts import config_of

SMALL = ["model=preact_resnet", "model.depth=11", "image=32", "batch=2", "device=cpu"]
RIGHT = {"check": {"value": 1e-7, "exact": 1e-13, "ok": True}}
WRONG = {"check": {"value": 1e-7, "exact": 0.5, "ok": False}}


def task_of(*words):
    return composed_task(PARSER.read(list(words)))


@pytest.fixture(scope="module")
def choices():
    """The cases of one network of ``bench choose``."""
    return task_of("choose", "--only", "resnet18")


def test_rows_of_hires_compose_for_their_task():
    training = {row["name"]: row for row in task_of("layouts", *SMALL)["rows"]}
    assert {"single", "tiles 2x1", "dp", "torch 1f1b", "sp+gems"} <= training.keys()
    assert "two modules" not in training  # is one of inference
    config = from_dict(training["pp 1f1b"]["config"])
    assert (config.parallel.stages, config.parallel.microbatches) == (2, 4)
    assert row_of(training["dp"]).config.batch == 4  # images of a microbatch times its number
    rows = task_of("precision", *SMALL, "batch=3", "--only", "hires int8*")["rows"]
    assert [row["name"] for row in rows] == ["hires fp32", "hires int8", "hires int8, two tiles"]
    assert "batch=3" in rows[0]["words"]  # those of the command take the place of the file's
    assert "batch=8" not in rows[0]["words"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("layuots", "did you mean layouts"),
        ("layouts --only nothing", "--only nothing names no row"),
        ("layouts imgae=3", "imgae"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        task_of(*words.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": {path} holds no keys"),
        ("{rows: [{name: a}], row: 3}", ": unknown key row; choose one of every, keys"),
        ("{rows: [{name: a, colour: 1}]}", ", row 'a': unknown key colour; choose one of baseline"),
        ("{rows: [{name: a, baseline: abc}]}", "no row 'abc' is beside it; choose one of a"),
        (
            "{rows: [{name: ab}, {name: a, beside: [abc]}]}",
            "row 'a': no row 'abc' is beside it; did",
        ),
        ("{rows: [{name: a, keys: [imgae=3]}]}", ", row 'a': unknown key 'imgae'"),
        ("{rows: [{name: a}, {name: a}]}", ", row 'a': train"),
        ("{rows: [{name: a, each: {steps: 2}}]}", ", row 'a': each.steps=2 must be a list"),
        (
            "{rows: [{name: a}, {name: b, baseline: a, keys: [batch=4]}]}",
            ", row 'b': its baseline 'a' is not in train",
        ),
    ],
)
def test_file_of_rows_that_makes_no_sense_is_refused_by_file_row_and_value(tmp_path, text, message):
    path = tmp_path / "rows.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        task_of(str(path), *[word for word in SMALL if word != "batch=2"])
    assert str(error.value).startswith(str(path))
    assert message.format(path=path) in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("peer: tensorflow", "row 'b': unknown peer 'tensorflow'; choose one of"),
        ("keys: ['parallel.tiles=[64,1]']", "row 'b': .*tiles"),
    ],
)
def test_row_that_cannot_be_built_is_named(tmp_path, row, message):
    path = tmp_path / "rows.yaml"
    path.write_text(f"{{rows: [{{name: a}}, {{name: b, {row}}}]}}")
    with pytest.raises((ConfigError, PlanError), match=message):
        list(rows_bench.measure(task_of(str(path), *SMALL)))


def test_small_image_is_one_that_every_layout_can_cut():
    keys = {"model": {"name": "preact_resnet", "depth": 11, "classes": 10}, "image": [128, 128]}
    single = planned(BenchRow("single", config_of(**keys)))
    tiles = planned(BenchRow("tiles", config_of(**keys, parallel={"tiles": [4, 1]})))
    rows = with_small([single, tiles])
    assert len({tuple(row.small.config.image) for row in rows}) == 1
    assert rows[1].small.config.height < 128
    assert rows[1].small.config.precision.name == "fp64"


def test_images_for_statistics_are_the_most_of_any_row(tmp_path):
    config = row_of(task_of("precision", *SMALL, "--only", "torch fp32")["rows"][0]).config
    rows = [BenchRow(f"{count}", config, settings={"statistics": count}) for count in (2, 4)]
    rows = with_inputs([BenchRow("first", config), *rows], [], tmp_path, 60)
    assert [row.settings["statistics"] for row in rows] == [4, 4, 4]
    assert {row.config.weights for row in rows} == {str(tmp_path / "weights.safetensors")}


def test_kernels_are_counted_by_the_type_that_they_read():
    line = "onednn_verbose,v1,primitive,exec,cpu,convolution,jit,fwd,src:{}::blocked wei:f32,,,1.5"
    text = "\n".join(line.format(kind) for kind in ("u8", "u8", "f32"))
    assert count_kernels(f"{text}\nonednn_verbose,v1,info,cpu") == {"u8": 2, "f32": 1}
    assert ran_as("int8", {"u8": 3})
    assert not ran_as("int8", {"u8": 3, "f32": 1})
    assert not ran_as("fp32", {})


def table_of(facts, cpu_s=1.0):
    def row_and_samples(name, batch, steps_s, ranks=2, cpu_s=1.0, **keys):
        row = BenchRow(name, config_of(batch=batch, device="cpu"), ranks=ranks, **keys)
        return row, Samples([[steps_s], [2 * steps_s], [steps_s]], [cpu_s] * 3)

    both = [
        row_and_samples("single", 2, 4.0, ranks=1, cpu_s=6.0, threads=2),
        row_and_samples("tiles", 4, 2.0, cpu_s=cpu_s, beside=("torch",), predicted_s=1.5),
        row_and_samples("torch", 4, 3.0, peer="module"),
    ]
    samples = {row.name: sampled for row, sampled in both}
    facts = {"single": RIGHT, "torch": RIGHT, "tiles": RIGHT, **facts}
    return {row["name"]: row for row in measured_rows([row for row, _ in both], samples, facts)}


def test_speed_up_counts_images_within_each_round_beside_right_rows_alone():
    rows = table_of({})
    assert rows["tiles"]["speedup"] == {
        **dict.fromkeys(("median", "p10", "p90", "p99"), 4.0),
        "count": 3,
    }
    assert (rows["tiles"]["over_best"]["median"], rows["tiles"]["best"]) == (1.5, "torch")
    assert rows["tiles"]["images_per_s"] == 2.0
    cells = {row["row"]: row for row in row_table("t", [*rows.values()]).rows}["tiles"]
    assert {**cells, "what": ""} == {
        "row": "tiles", "ranks": "2", "images": "4", "step ms": "2000.0", "p10": "2000.0",
        "p90": "3600.0", "n": "3", "predicted ms": "1500.0", "images/s": "2.000",
        "speed-up": "4.00 (4.00-4.00)", "over the fastest other": "1.50 (1.50-1.50)",
        "cores": "0.50", "errors": "1e-07 1e-13", "what": "",
    }  # fmt: skip
    assert "speedup" not in table_of({"single": WRONG})["tiles"]
    assert "over_best" not in table_of({"torch": WRONG})["tiles"]


@pytest.mark.parametrize(
    ("facts", "cpu_s", "why"),
    [
        (WRONG, 1.0, "it computes something else"),
        ({}, 1.0, "it was not compared"),
        ({**RIGHT, "wrong": "kernels of another type than int8"}, 1.0, "kernels of another type"),
        (RIGHT, 9.0, "cores busy"),
    ],
)
def test_wrong_row_is_red_and_has_no_ratio(facts, cpu_s, why):
    rows = table_of({"tiles": facts}, cpu_s)
    assert not rows["tiles"]["ok"]
    assert not {"speedup", "over_best"} & rows["tiles"].keys()
    cells = {row["row"]: row for row in row_table("t", [*rows.values()]).rows}
    assert cells["tiles"]["what"].startswith("WRONG")
    assert why in cells["tiles"]["what"]


def test_predictions_are_weighed_by_error_order_and_choice():
    assert kendall_tau([(1, 3), (2, 2), (3, 1)]) == -1.0
    rows = [{"predicted_s": p, "step_s": {"median": m}} for p, m in ((1.0, 2.0), (2.0, 1.0))]
    lines = choice_facts({"a": rows, "b": [{**rows[0], "predicted_s": None}]})
    assert lines == [
        "mean error of a predicted step: 75.0%; 1 cases; median 75.0%",
        "choices within 5% of the best measured layout: 0 of 1; 1 cases; "
        "mean of Kendall's tau -1.00",
    ]
    # Layouts of different shapes are spread from the fastest to the slowest.
    shapes = [LayoutShape(n // 2, 1, 0, (1, 1), 1, 1) for n in range(12)]
    options = [{"n": n, "keys": Candidate(shape).keys} for n, shape in enumerate(shapes)]
    assert [option["n"] for option in of_different_shapes(options, 3)] == [0, 4, 10]
    assert [option["n"] for option in of_different_shapes(options, 9)] == [0, 2, 4, 6, 8, 10]


def test_rows_of_each_number_of_ranks_have_a_world_with_their_baseline(tmp_path, monkeypatch):
    worlds = {}

    def measured(job, num_ranks, timeout_s, rows, *rest):
        worlds[num_ranks] = [row.name for row in rows]
        names = worlds[num_ranks]
        yield {name: ([[1.0]], [0.1]) for name in names}, dict.fromkeys(names, RIGHT)

    monkeypatch.setattr(rows_bench, "stream_ranks", measured)
    rows = [{"name": f"{n}", "keys": [f"parallel.replicas={n}"]} for n in (1, 2, 4)]
    rows += [{"name": "again"}, {"name": "ddp", "peer": "ddp", "keys": rows[1]["keys"]}]
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump({"rows": rows}))
    task = task_of(str(tmp_path / "rows.yaml"), *SMALL, "--rounds", "1")
    *_, first, result = (json.loads(json.dumps(one)) for one in rows_bench.measure(task))
    [rows] = result["groups"].values()
    assert worlds == {2: ["1", "2", "again", "ddp"], 4: ["1", "4"]}
    assert [row["name"] for row in rows] == ["1", "2", "again", "ddp", "4"]
    assert {row["name"]: row["speedup"]["median"] for row in rows}["4"] == 4.0
    worlds.clear()  # stopped after the first world, it resumes with the second
    *_, resumed = rows_bench.measure({**task, "before": first["groups"]})
    assert worlds == {4: ["1", "4"]}
    assert resumed == result


def test_case_that_fails_is_red_and_ends_no_other(monkeypatch, choices):
    def fail(rows, task, known):
        raise ConfigError("no calibration")
        yield

    monkeypatch.setattr(rows_bench, "_raced", fail)
    *_, result = rows_bench.measure(choices)
    assert len(result["groups"]) == 9
    assert not result["ok"]
    assert all("no calibration" in table.rows[0]["what"] for table in group_tables(result))


def test_stopped_benchmark_keeps_and_shows_what_it_measured(tmp_path, monkeypatch, capsys):
    def measure(task):
        yield {"groups": {}, "facts": ["device: cpu"]}
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(rows_bench, "measure", measure)
    file = tmp_path / "task.json"
    task = {"kind": "rows", "name": "layouts", "command": "c", "out": str(tmp_path), "json": True}
    file.write_text(json.dumps(task))
    monkeypatch.setattr(sys, "argv", ["", str(file)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert bench_main.main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not json.loads((tmp_path / "layouts.json").read_text())["complete"]
    assert "* stopped before its end" in (tmp_path / "README.md").read_text()
    printed = capsys.readouterr()
    assert "stopped by Ctrl-C" in printed.err
    assert json.loads(printed.out)["facts"] == ["device: cpu"]


@pytest.mark.dist
def test_rows_run_in_turns_and_are_right(monkeypatch):
    monkeypatch.setattr(rows_bench, "stream_ranks", forked)
    task = task_of("layouts", *SMALL, "--only", "tiles 2x1,half*,ddp,torch 1f1b", "--rounds", "1")
    *_, result = rows_bench.measure(task)
    [rows] = result["groups"].values()
    assert {row["name"] for row in rows} > {"single", "tiles 2x1", "ddp", "torch 1f1b"}
    for row in rows:
        assert row["ok"], row
        assert row["speedup"]["median"] > 0
        assert row["name"] == "half images" or row["check"]["exact"] < 1e-9
