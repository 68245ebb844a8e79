"""``hires list runs``, ``report`` and ``export`` hand on what the run folders hold."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.compared_runs import compared_run, failed_run
from tests.helpers.report_runs import report_run
from tests.helpers.run_folders import make_run

RESULTS = Path("results")
STEPS = [0.5, 0.5, 0.5]


@pytest.fixture(scope="module")
def four_runs(tmp_path_factory) -> Path:
    """A quick run, a slow one in bf16, a failed one and one that never began."""
    results = tmp_path_factory.mktemp("four") / "results"
    compared_run(results, [STEPS], batch=4, image=[64, 64])
    compared_run(results, [STEPS], batch=16, image=[96, 96], precision={"name": "bf16"})
    failed_run(results, "out of memory", campaign="other", image=[128, 96])
    make_run(results)
    return results


@pytest.fixture
def runs(hires, four_runs):
    shutil.copytree(four_runs, RESULTS)


def listed(hires, *words):
    answer = hires("list", "runs", "--json", *words)
    assert answer.code == 0, answer.err
    return [(row["state"], row["image"]) for row in json.loads(answer.out)["runs"]]


SMALL, LARGE, FAILED, PENDING = (
    ("done", "64x64"), ("done", "96x96"), ("failed", "128x96"), ("pending", "64x64"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ('precision == "bf16" and throughput > 10', [LARGE]),
        ("throughput > 10 or state == 'failed'", [LARGE, FAILED]),
        ("throughput == null", [PENDING, FAILED]),
        ("image == [128, 96]", [FAILED]),
        ("image in ['64x64', 7] and image < 65", [SMALL, PENDING]),
        ("'memory' not in cause", [PENDING, LARGE, SMALL]),
        ("memory > 50000000 and loss < 3 and step_time == 0.5", [LARGE, SMALL]),
    ],
)
@pytest.mark.usefixtures("runs")
def test_runs_of_which_an_expression_is_true_are_listed(hires, where, kept):
    assert sorted(listed(hires, "--where", where)) == sorted(kept)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--where", "troughput > 10"], "did you mean throughput"),
        (["--where", "state > 3"], "cannot be worked out"),
        (["--where", "__import__('os').system('touch made')"], "holds"),
        (["--sort", "speeed"], "is no name of a run"),
        (["--csv", "--json"], "--csv"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_mistakes_of_a_list_end_with_2(hires, words, told):
    answer = hires("list", "runs", *words)
    assert (answer.code, told in answer.err) == (2, True)
    assert not Path("made").exists()


@pytest.mark.usefixtures("runs")
def test_runs_are_sorted_and_written_as_csv(hires):
    assert listed(hires, "--sort", "throughput")[:2] == [SMALL, LARGE]
    assert listed(hires, "--sort=-throughput")[:2] == [LARGE, SMALL]
    assert listed(hires, "--sort", "batch", "--campaign", "other") == [FAILED]
    rows = list(csv.DictReader(io.StringIO(hires("list", "runs", "--csv").out)))
    assert {row["state"] for row in rows} == {"done", "failed", "pending"}
    answer = hires("list", "runs", "--where", "image < 100")
    assert "--where: 1 runs left out" in answer.err  # of which it makes no sense


@pytest.fixture(scope="module")
def one_run(tmp_path_factory) -> Path:
    """Results with a run that a report draws."""
    return report_run(tmp_path_factory.mktemp("report") / "results", "pp")


@pytest.fixture
def run(hires, one_run):
    shutil.copytree(one_run.parents[1], RESULTS)
    return RESULTS / "default" / one_run.name


def test_report_is_a_page_and_its_files(hires, run):
    answer = hires("report", "--json")
    assert answer.code == 0, answer.err
    told = json.loads(answer.out)
    assert told["runs"] == 1
    assert any(line.startswith("Precision against error: ") for line in told["not_drawn"])
    for name in ("index.html", "tables/throughput.csv", "plots/timeline.svg"):
        assert Path("report", name).is_file()


@pytest.fixture
def attempts(hires):
    """Two attempts of a run, and a run that failed."""
    compared_run(RESULTS, [[0.5, 0.5, 0.25]] * 2, campaign="a")
    failed_run(RESULTS, "=cmd|' /C calc'!A0", campaign="b")


def rows(name):
    with Path("out", f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("attempts")
def test_csv_holds_runs_attempts_steps_and_configs(hires):
    answer = hires("export", "--to", "csv", "--out", "out")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("2 runs, ")
    assert [row["state"] for row in rows("runs")] == ["done", "failed"]
    assert [float(row["step_s_median"]) for row in rows("attempts")] == [0.5, 0.5]
    assert [row["counted"] for row in rows("samples")] == ["no", "yes", "yes", "yes"] * 2
    assert rows("configs")[0]["parallel.tiles"] == "[1,1]"
    assert rows("failures")[0]["cause"].startswith("'=cmd")  # no formula in a spreadsheet
    assert hires("export", "--to", "csv", "--out", "out", "b").code == 0
    assert len(rows("runs")) == 1


@pytest.mark.usefixtures("attempts")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--to", "csv"], "--to csv writes a folder; name it, as --out"),
        (["--to", "csb", "--out", "out"], "did you mean csv"),
        (["--to", "onnx", "--out", "net.onnx"], "writes the network of one run, not 0; name one"),
        (["RUN", "--to", "onnx"], "kept no weights; run it with checkpoint.at_end=always"),
        (["net.safetensors", "--to", "exported"], "net.safetensors is not of a run"),
    ],
)
def test_mistakes_of_an_export_end_with_2(hires, words, text):
    Path("file").touch()
    run = str(next(RESULTS.glob("a/*")))
    answer = hires("export", *[run if word == "RUN" else word for word in words])
    assert (answer.code, text in answer.err) == (2, True), answer.err
    assert not [*Path().glob("*.onnx"), *Path().glob("out")]
