"""Do the tables say what the samples say?"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hires.bench.bench_output import origin
from hires.bench.contestants import LayoutsOptions, line_up
from hires.bench.judge import Deviation
from hires.bench.layouts_bench import BENCHMARK, result_of
from hires.bench.layouts_table import measured_rows, row_not_run
from hires.bench.timing import Samples


@pytest.fixture(scope="module")
def rows():
    options = LayoutsOptions(model="resnet18", image=[48, 48], only=("dp",), device="cpu")
    return line_up(options, "train")


STEP_S = {
    "single": [4.0, 8.0, 4.0],
    "module": [5.0, 10.0, 5.0],
    "module, no trick": [6.0, 12.0, 6.0],
    "two threads": [2.0, 4.0, 2.0],
    "dp": [4.0, 8.0, 4.0],
    "ddp": [8.0, 16.0, 8.0],
    "ddp views": [6.0, 12.0, 6.0],
}
SAMPLES = {name: Samples(step_s, [1.5, 1.5, 1.5]) for name, step_s in STEP_S.items()}


def found(rows, **verdicts):
    values = dict.fromkeys(SAMPLES, Deviation(1e-6, 1e-12, 1e-12)) | verdicts
    made = measured_rows(rows, SAMPLES, values)
    options = {"model": "resnet18", "image": [48, 48], "batch": 1, "device": "cpu"}
    return {**origin("hires bench layouts"), **result_of(options, {"train": made})}


def row_of(answer, name):
    return next(row for row in answer["tasks"]["train"] if row["name"] == name)


def test_speedup_counts_images_not_steps(rows):
    answer = found(rows)
    assert row_of(answer, "two threads")["speedup"]["median"] == 2
    assert row_of(answer, "dp")["images"] == 2
    assert row_of(answer, "dp")["speedup"]["median"] == 2  # two images in the time of one


def test_torch_is_represented_by_its_fastest_row(rows):
    row = row_of(found(rows), "dp")
    assert row["peer"] == "ddp views"
    assert row["beside_torch"]["median"] == 1.5
    assert row_of(found(rows), "ddp")["beside_torch"] is None


def test_wrong_row_is_red(rows):
    answer = found(rows, dp=Deviation(0.2, 0.0, 0.0))
    assert found(rows)["ok"]
    assert not answer["ok"]
    assert not row_of(answer, "dp")["ok"]
    assert "WRONG 2e-01 0e+00" in BENCHMARK.text(answer)


def test_row_without_an_answer_is_red(rows):
    assert not row_of(found(rows, dp=None), "dp")["ok"]


def test_folder_holds_numbers_command_machine_and_commit(rows, tmp_path):
    answer = found(rows)
    BENCHMARK.keep(tmp_path / "layouts-x", answer)
    kept = json.loads((tmp_path / "layouts-x/layouts.json").read_text())
    assert kept == answer
    readme = (tmp_path / "layouts-x/README.md").read_text()
    assert "    hires bench layouts\n" in readme
    assert "| dp | 2 | 1 | 2 | 4000.0 |" in readme
    assert f"{answer['hardware']['cores']} cores" in readme
    assert f"torch {answer['torch']}" in readme


def test_row_that_cannot_run_says_why_and_is_compared_with_nothing(rows):
    run = [row for row in rows if row.kind != "ddp"]
    left_out = [
        replace(row, config=replace(row.config, device="simulated"))
        for row in rows
        if row not in run
    ]
    samples = {row.name: SAMPLES[row.name] for row in run}
    verdicts = dict.fromkeys(samples, Deviation(0.0, 0.0, 0.0))
    made = [*measured_rows(run, samples, verdicts), *map(row_not_run, left_out)]
    assert next(row for row in made if row["name"] == "dp")["beside_torch"] is None
    options = {"model": "resnet18", "image": [48, 48], "batch": 1, "device": "simulated"}
    text = BENCHMARK.text({**origin(""), **result_of(options, {"train": made})}, "kept")
    assert "device: simulated (a rehearsal" in text
    assert text.count("not run: torch has no backend for messages of device=simulated") == 2
