"""Rows are data: composed as a run is, planned, measured in turns, and kept as they come."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import yaml

from hires.bench import bench_main
from hires.bench.bench_output import Benchmark
from hires.bench.bench_rows import BenchRow, planned, row_of, with_small
from hires.bench.chosen_rows import kendall_tau, normalise_by_reference, of_different_shapes
from hires.bench.kernel_types import count_graph, count_kernels, count_profile, ran_as
from hires.cli.verbs.verb_bench import PARSER, composed_task, file_of_rows, merged
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError, PlanError
from tests.helpers.layouts import config_of
from tests.helpers.patience import PATIENCE_S

SMALL = ["model=preact_resnet", "model.n=1", "image=32", "batch=2", "device=cpu"]


def task_of(*words):
    return composed_task(PARSER.read(list(words)))


def rows_of(*words):
    return {row["name"]: row for row in task_of(*words)["rows"]}


def test_rows_of_hires_compose_for_their_task():
    training = rows_of("layouts", *SMALL)
    assert {"single", "tiles 2x1", "dp", "torch 1f1b", "sp+gems"} <= training.keys()
    assert "two modules" not in training
    config = from_dict(training["pp 1f1b"]["config"])
    assert (config.parallel.stages, config.parallel.microbatches) == (2, 4)
    assert config.model.classes == 1000
    inference = rows_of("layouts", *SMALL, "task=infer", "--only", "dp")
    assert set(inference) == {"single", "dp", "two modules"}
    assert row_of(inference["dp"]).config.batch == 4  # images of a microbatch times its number
    precision = rows_of("precision", *SMALL, "--only", "hires int8*")
    assert set(precision) == {"hires fp32", "hires int8", "hires int8, two tiles"}
    assert precision["hires int8"]["settings"]["statistics"] == 32


def test_cases_of_a_choice_are_every_image_and_number_of_ranks():
    rows = task_of("choose", "--only", "resnet18")["rows"]
    cases = {(row["config"]["image"][0], row["config"]["ranks"]) for row in rows}
    assert cases == {(image, ranks) for image in (128, 192, 256) for ranks in (2, 3, 4)}
    assert len({row["title"] for row in rows}) == 9
    assert sum(3 * 3 for _ in file_of_rows("choose")["rows"]) == 27


def test_keys_of_a_row_come_after_those_of_the_command():
    assert merged(["a=1", "b=2"], ["b=3"], ["a=4"]) == ["a=4", "b=3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layuots"], "did you mean layouts"),
        (["layouts", "model=vgg"], "vgg"),
        (["layouts", "--only", "nothing"], "--only nothing names no row"),
        (["layouts", "imgae=3"], "imgae"),
        (["rows.yaml"], "unknown fields colour"),
        (["empty.yaml"], "has no `rows`"),
    ],
)
def test_rows_that_make_no_sense_are_refused(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump({"rows": [{"name": "a", "colour": 1}]}))
    (tmp_path / "empty.yaml").write_text("notes: none\n")
    with pytest.raises(ConfigError) as error:
        task_of(*words)
    assert message in str(error.value)


def test_unknown_peer_and_impossible_layout_are_refused():
    with pytest.raises(ConfigError, match="unknown peer 'tensorflow'"):
        _ = BenchRow("row", config_of(), peer="tensorflow").lacks
    row = BenchRow("row", config_of(parallel={"tiles": [64, 1]}))
    with pytest.raises(PlanError):
        planned(row)


def test_small_image_is_one_that_every_layout_can_cut():
    keys = {"image": [512, 512], "batch": 1, "precision": {"name": "fp32"}}
    single = planned(BenchRow("single", config_of(**keys)))
    tiles = planned(BenchRow("tiles", config_of(**keys, parallel={"tiles": [4, 1]})))
    rows = with_small([single, tiles])
    assert len({tuple(row.small.config.image) for row in rows}) == 1
    assert rows[1].small.config.height < 512
    assert rows[1].small.config.precision.name == "fp64"
    same = BenchRow.of_plain(json.loads(json.dumps(rows[1].plain())))
    assert same == rows[1]


def test_kernels_are_counted_by_the_type_that_they_read():
    line = "onednn_verbose,v1,primitive,exec,cpu,convolution,jit,fwd,src:{}::blocked wei:f32,,,1.5"
    text = "\n".join(line.format(kind) for kind in ("u8", "u8", "f32"))
    assert count_kernels(f"{text}\nonednn_verbose,v1,info,cpu") == {"u8": 2, "f32": 1}
    event = {"cat": "Node", "name": "a_kernel_time"}
    convs = [
        {**event, "args": {"op_name": name, "input_type_shape": [{kind: [1]}]}}
        for name, kind in (("Conv", "float"), ("ConvTranspose", "float"), ("Relu", "float"))
    ]
    assert count_profile(convs) == {"f32": 1, "f32 ConvTranspose": 1}
    node = {"layerType": "Convolution", "runtimePrecision": "u8", "primitiveType": "brgconv_FP32"}
    assert count_graph([node]) == {"fp32": 1}
    assert ran_as("int8", {"u8": 3, "f32 ConvTranspose": 1})
    assert not ran_as("int8", {"u8": 3, "f32": 1})
    assert not ran_as("fp32", {})


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [([(1, 1), (2, 2), (3, 3)], 1.0), ([(1, 3), (2, 2), (3, 1)], -1.0), ([(1, 1)], 1.0)],
)
def test_kendalls_tau(pairs, tau):
    assert kendall_tau(pairs) == tau


def test_pace_of_each_round_is_taken_out_of_the_steps():
    # The machine is twice as slow in the second round, and 1.5 times as slow as when calibrated.
    steps_s = [[3.0, 6.0, 3.0], [6.0, 12.0, 6.0]]
    assert normalise_by_reference(steps_s, [1.5, 3.0, 1.5], 1.0) == pytest.approx([2.0, 4.0])


def test_layouts_of_different_shapes_are_spread_from_the_fastest_to_the_slowest():
    names = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")
    options = [{"n": n, "keys": {f"parallel.{k}": n // 2 for k in names}} for n in range(12)]
    assert [one["n"] for one in of_different_shapes(options, 3)] == [0, 4, 10]
    assert [one["n"] for one in of_different_shapes(options, 9)] == [0, 2, 4, 6, 8, 10]


def test_groups_that_the_folder_holds_are_not_measured_again(monkeypatch):
    monkeypatch.setattr(bench_main, "_measured", lambda rows, task: iter([[{"ok": True}]]))
    task = {**task_of("choose", "--only", "resnet18"), "warmup": 1}
    results = [*bench_main.measure(task, None)]
    half = {**results[-1], "done": results[-1]["done"][:4]}
    assert len([*bench_main.measure(task, json.loads(json.dumps(half)))]) == 10
    assert len([*bench_main.measure({**task, "rounds": 99}, half)]) == 18


def test_case_that_fails_is_red_and_ends_no_other(monkeypatch):
    def fail(rows, task):
        raise ConfigError("no calibration")
        yield

    monkeypatch.setattr(bench_main, "_measured", fail)
    *_, result = bench_main.measure({**task_of("choose", "--only", "resnet18"), "warmup": 1}, None)
    assert len(result["groups"]) == 9
    assert not result["ok"]
    assert all("no calibration" in table.rows[0]["what"] for table in bench_main.tables(result))


def test_stopped_benchmark_keeps_what_it_measured(tmp_path, capsys):
    def measure(previous):
        yield {"rows": 1}
        raise KeyboardInterrupt

    made = Benchmark("layouts", "hires bench layouts", measure, lambda result: [])
    assert made.run(tmp_path, as_json=True) == 130
    kept = json.loads((tmp_path / "layouts.json").read_text())
    assert (kept["rows"], kept["complete"]) == (1, False)
    assert "* stopped before its end" in (tmp_path / "README.md").read_text()
    assert "stopped by Ctrl-C" in capsys.readouterr().err


@pytest.mark.dist
def test_rows_run_in_turns_and_are_right(tmp_path):
    words = [*SMALL, "--only", "sp,dp,torch 1f1b", "--rounds", "10000", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "hires", "bench", "layouts", *words]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE) as bench:
        try:
            begin_s = time.monotonic()
            while not (tmp_path / "layouts.json").exists() and bench.poll() is None:
                assert time.monotonic() - begin_s < PATIENCE_S
                time.sleep(0.05)
            bench.send_signal(signal.SIGTERM)
            assert bench.wait(PATIENCE_S) == 130
        finally:
            bench.kill()
    kept = json.loads((tmp_path / "layouts.json").read_text())
    assert not kept["complete"]
    [rows] = kept["groups"].values()
    assert {row["name"] for row in rows} > {"single", "tiles 2x1", "shard 2x1", "ddp", "torch 1f1b"}
    for row in rows:
        assert row["ok"], row
        assert row["speedup"]["median"] > 0
        assert row["name"] == "half images" or row["check"]["exact"] < 1e-9
