"""``hires list`` and ``export`` hand on what there is, ``hires data`` makes and checks images."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from hires.cli.choices import ALIASES, config_keys, groups
from hires.core.store import campaign
from hires.core.store.campaign import Campaign, PlannedPoint
from tests.helpers.compared_runs import compared_run, failed_run
from tests.helpers.report_runs import change
from tests.helpers.run_folders import make_run

RESULTS = Path("results")
STEPS = [0.5, 0.5, 0.5]
SMALL, LARGE, FAILED, PENDING = (
    ("done", "64x64"), ("done", "96x96"), ("failed", "128x96"), ("pending", "64x64"),
)  # fmt: skip


@pytest.fixture
def runs(hires):
    """A quick run, a slow one in bf16, a failed one and one that never began."""
    compared_run(RESULTS, [STEPS], batch=4, image=[64, 64])
    compared_run(RESULTS, [STEPS], batch=16, image=[96, 96], precision={"name": "bf16"})
    failed_run(RESULTS, "out of memory", campaign="other", image=[128, 96])
    make_run(RESULTS)


def listed(hires, *words):
    answer = hires("list", "runs", "--json", *words)
    assert answer.code == 0, answer.err
    return [(row["state"], row["image"]) for row in json.loads(answer.out)["runs"]]


@pytest.mark.usefixtures("runs")
def test_runs_are_chosen_by_an_expression_and_sorted(hires):
    for where, kept in (
        ("throughput > 10 or state == 'failed'", [LARGE, FAILED]),
        ("throughput == null", [PENDING, FAILED]),
        ("image == [128, 96]", [FAILED]),
        ("image == 128 / 2", [SMALL, PENDING]),
        ("'memory' not in cause", [PENDING, LARGE, SMALL]),
        ("memory > 50000000 and loss < 3 and step_time == 0.5", [LARGE, SMALL]),
    ):
        assert sorted(listed(hires, "--where", where)) == sorted(kept)
    assert listed(hires, "--sort=-throughput")[:2] == [LARGE, SMALL]
    assert len(listed(hires, "--sort=-throughput")) == 4  # those without one come last
    assert listed(hires, "--sort=-batch")[0] == LARGE  # 16 is more than 4
    assert listed(hires, "--sort", "batch", "--campaign", "other") == [FAILED]
    answer = hires("list", "runs", "--where", "image < 100")
    assert "--where: 1 runs left out" in answer.err  # of which it makes no sense
    for words, text in (
        (["--where", "troughput > 10"], "did you mean throughput"),
        (["--where", "state > 3"], "cannot be worked out"),
        (["--where", "__import__('os').system('touch made')"], "holds"),
        (["--sort", "speeed"], "is no name of a run"),
    ):
        answer = hires("list", "runs", *words)
        assert (answer.code, text in answer.err) == (2, True)
    assert not Path("made").exists()


def test_every_metric_of_an_evaluation_is_listed_chosen_and_compared(hires):
    metrics = {"mean_ap": (0.25, "25.00"), "rmse": (1.8603, "1.8603"), "psnr": (31.25, "31.250")}
    bests = {"mean_ap": "0.7639 mean_ap", "rmse": "1.86 rmse", "psnr": "31.2 dB psnr"}
    values = {"mean_ap": 0.7639, "rmse": 1.86, "psnr": 31.2}
    for name, (value, _) in metrics.items():
        for seed in (1, 2):
            run = compared_run(RESULTS, [STEPS], campaign=f"{name}{seed}", batch=seed)
            best = {"metric": name, "best": {"images": 9, name: values[name]}}
            change(run, evaluation={"images": 9, name: value / seed}, validation=best)
    table = hires("list", "runs").out
    for name, (value, text) in metrics.items():
        assert {text in table, bests[name] in table} == {True}, table
        assert len(listed(hires, "--where", f"{name} > {value * 0.9} and {name} < 99")) == 1
        assert len(listed(hires, "--where", f"validation_metric == '{name}'")) == 2
        answer = hires("compare", f"{name}1", f"{name}2", "--metric", name)
        assert f"{name}: " in answer.out, answer.err
        better = "lower" if name == "rmse" else "higher"
        assert (f"{better} is better" in answer.out, "-50" in answer.out) == (True, True)
    assert len(listed(hires, "--where", "mean_ap > 20")) == 1  # as the table shows it


def rows(name):
    with Path("out", f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_export_as_csv_holds_runs_attempts_steps_and_configs(hires):
    run = compared_run(RESULTS, [[0.5, 0.5, 0.25]] * 2, campaign="a")
    failed_run(RESULTS, "=cmd|' /C calc'!A0", campaign="b")
    Path("file").touch()
    for words, text in (
        (["--to", "csv"], "--to csv writes a folder; name it, as --out"),
        (["--to", "csb", "--out", "out"], "did you mean csv"),
        (["--to", "onnx", "--out", "net.onnx"], "writes the network of one run, not 0; name one"),
        (
            [str(run), "--to", "onnx"],
            "kept no weights; run it with checkpoint.at_end=always --again,",
        ),
        (["net.safetensors", "--to", "exported"], "net.safetensors is not of a run"),
    ):
        answer = hires("export", *words)
        assert (answer.code, text in answer.err) == (2, True), answer.err
    assert not [*Path().glob("*.onnx"), *Path().glob("out")]
    answer = hires("export", "--to", "csv", "--out", "out")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("2 runs, ")
    assert [row["state"] for row in rows("runs")] == ["done", "failed"]
    assert [float(row["step_s_median"]) for row in rows("throughput")] == [0.5, 0.5]
    assert [row["counted"] for row in rows("samples")] == ["no", "yes", "yes", "yes"] * 2
    assert rows("configs")[0]["parallel.tiles"] == "[1,1]"
    assert rows("failures")[0]["cause"].startswith("'=cmd")  # no formula in a spreadsheet
    assert hires("export", "--to", "csv", "--out", "out", "b").code == 0
    assert len(rows("runs")) == 1
    # What a campaign planned belongs to all of its runs together.
    other = compared_run(RESULTS, [[0.5]], campaign="a", batch=8)
    campaign.write(RESULTS / "a", Campaign("a", points=[PlannedPoint("resnet18-00000000", [])]))
    for number, (words, planned) in enumerate(((["a"], 1), ([run], 0), ([run, other], 1))):
        out = f"out{number}"
        assert hires("export", "--to", "csv", "--out", out, *map(str, words)).code == 0
        assert Path(out, "planned.csv").exists() == planned


def test_every_file_key_and_alias_is_listed(hires):
    text = hires("list").out
    for group, names in groups().items():
        assert f"\n{group}\n" in f"\n{text}"
        assert all(f"\n  {name} " in text for name in names), group
    assert all(key.meaning for key in config_keys().values())
    text = hires("list", "aliases").out
    for word, (key, _) in ALIASES.items():
        assert word in text
        assert key.split("=")[0] in config_keys()


def test_folder_of_images_is_made_once_and_checked(hires):
    words = ["data", "make", "my images", "--classes", "3", "--count", "6", "--size", "20x30"]
    answer = hires(*words)
    assert (answer.code, answer.err) == (0, "")
    assert "6 images of 20 x 30 in 3 classes, 6 written now" in answer.out
    assert len(list(Path("my images").glob("*/*.tif*"))) == 6
    assert "there already" in hires(*words).out
    answer = hires("data", "check", "my images", "--json")
    assert (answer.code, sum(json.loads(answer.out)["classes"].values())) == (0, 6)
    next(Path("my images").glob("*/*.tif*")).write_bytes(b"II*\0")
    answer = hires("data", "check", "my images", "--json")
    assert (answer.code, json.loads(answer.out)["ok"]) == (1, False)


def test_mistakes_end_with_2_and_write_nothing(hires):
    Path("d").mkdir()
    Path("d/thesis.pdf").write_text("precious")
    for words, text in (
        (["--size", "big"], "write HEIGHTxWIDTH"),
        (["--classes", "4", "--count", "2"], "--count 2 must be at least 4"),
        (["image=4"], "image=4 is a key, which hires data make does not take"),
        (["--count", "4", "--size", "16"], "d"),
    ):
        answer = hires("data", "make", "d", *words)
        assert (answer.code, text in answer.err) == (2, True)
    assert [file.name for file in Path("d").iterdir()] == ["thesis.pdf"]
