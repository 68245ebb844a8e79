"""Do evaluations stand beside the most exact one of the same images?"""

from __future__ import annotations

import json
import shutil

import pytest

from hires.core.evaluation_summary import paired_difference
from hires.core.store.campaign import Campaign, PlannedPoint
from hires.report import frames
from hires.report.plots.base import PlotData, draw
from hires.report.read.evaluation_rows import evaluation_rows
from hires.report.read.runs import read_runs
from hires.report.summaries import summaries
from hires.report.tables import campaign_tables
from tests.helpers.compared_runs import compared_run

LABELS = [0, 1, 2, 3] * 25


def evaluated_run(results, predicted, precision, loss=0.5, **changes):
    """Makes the folder of an evaluation that predicted these classes."""
    changes = {"task": {"name": "evaluate"}, "weights": "net.pt", **changes}
    run = compared_run(results, [[0.5] * 3], precision={"name": precision}, **changes)
    for path in (run, run / "a0"):
        record = json.loads((path / "record.json").read_text())
        record["evaluation"] = {"images": len(predicted), "top1": 0.9, "loss": loss}
        record["loss"] = None  # a pass in inference writes none of its steps
        (path / "record.json").write_text(json.dumps(record))
    samples = {"id": [*range(len(predicted))], "label": LABELS, "predicted": predicted}
    held = {"samples": samples, "confusion": [[9, 1], [2, 8]], "classes": [{}, {}]}
    (run / "a0" / "evaluation.json").write_text(json.dumps(held))
    return run


@pytest.fixture
def runs(tmp_path):
    """An evaluation in fp32 that is wrong for 6 images, and two in 8 bits beside it."""
    exact = [9] * 6 + LABELS[6:]
    low = [9] * 4 + LABELS[4:90] + [8] * 10  # right for 2 more and wrong for 10 more
    return [
        evaluated_run(tmp_path, exact, "fp32"),
        evaluated_run(tmp_path, low, "int8", 0.51),
        evaluated_run(tmp_path, exact, "int8", 0.6, quant={"weights": "int4", "images": 64}),
    ]


@pytest.fixture
def rows(runs):
    return [*evaluation_rows(read_runs(runs))]


def test_difference_is_that_of_the_accuracies_with_an_interval_of_pairs(rows):
    exact, low, same = rows
    assert [row["reference"] for row in rows] == [None, "fp32", "fp32"]
    assert [exact[key] for key in ("agreement", "difference", "difference_low")] == [None] * 3
    assert low["agreement"] == 0.88
    assert low["difference"] == pytest.approx(-0.08)
    assert (low["difference_low"], low["difference_high"]) == paired_difference(2, 10, 100)
    assert (same["agreement"], same["difference"]) == (1, 0)


def test_evaluations_that_differ_in_quantisation_are_told_apart(rows):
    assert [row["quant"] for row in rows] == [None, None, "images=64, weights=int4"]


def test_report_of_evaluations_tells_weights_of_4_bits_apart(runs):
    # Two panels of the confusions were titled `single int8`, and the figure and the table of
    # precisions were of trainings only.
    held = frames.load(runs)
    labels = [run.label for run, _ in PlotData(held).confusions]
    assert labels == ["single fp32", "single int8", "single int8 images=64, weights=int4"]
    plots = {plot.name: plot for plot in draw(PlotData(held))}
    assert "weights=int4: 85 % right" in plots["confusion"].caption
    caption = plots["precision_error"].caption
    assert "int8 2.0e-02 beside fp32 (evaluation)" in caption
    assert "int8 images=64, weights=int4 2.0e-01 beside fp32 (evaluation)" in caption
    made = {table.name: table for table in summaries(held)}
    keys = [column.key for column in made["precision"].columns]
    shown = [dict(zip(keys, row, strict=True)) for row in made["precision"].rows]
    assert [row["loss"] for row in shown] == [0.5, 0.51, 0.6]
    assert [row["loss_error"] for row in shown] == [None, pytest.approx(0.02), pytest.approx(0.2)]
    assert [row["top1"] for row in shown] == [0.9] * 3
    assert "same class as fp32 [%]" in [one.heading for one in made["evaluations"].columns]


def test_runs_that_no_column_tells_apart_have_their_hash(tmp_path):
    runs = [evaluated_run(tmp_path, LABELS, "int8", seed=n) for n in (1, 2)]
    held = frames.load(runs)
    labels = [run.label for run, _ in PlotData(held).confusions]
    assert labels == [f"single {run.short}" for run in held.run_list]


def test_tables_of_a_campaign_have_the_agreement(runs):
    points = [PlannedPoint(run.name, [], 1) for run in runs]
    table = campaign_tables(runs[0].parent, Campaign("c", points=points))[0]
    assert table.name == "accuracy"
    keys = [column.key for column in table.columns]
    shown = [dict(zip(keys, row, strict=True)) for row in table.rows]
    assert [row["quant"] for row in shown] == [None, None, "images=64, weights=int4"]
    assert [row["agreement"] for row in shown] == [None, 0.88, 1.0]
    assert [row["difference"] for row in shown] == [None, pytest.approx(-0.08), 0]
    assert "same class as fp32 [%]" in table.to_markdown()


def test_every_attempt_of_a_run_says_how_it_is_quantised(runs):
    again = runs[2] / "a1"
    shutil.copytree(runs[2] / "a0", again)
    for path in (runs[2], again):
        record = json.loads((path / "record.json").read_text())
        (path / "record.json").write_text(json.dumps({**record, "attempt": 1}))
    points = [PlannedPoint(run.name, [], 2) for run in runs]
    table = campaign_tables(runs[0].parent, Campaign("c", points=points))[0]
    keys = [column.key for column in table.columns]
    shown = [dict(zip(keys, row, strict=True)) for row in table.rows]
    assert [row["attempt"] for row in shown] == [0, 0, 0, 1]
    assert [row["quant"] for row in shown] == [None, None, *["images=64, weights=int4"] * 2]


@pytest.mark.parametrize(
    ("data", "published"),
    [
        ({"name": "cifar10", "path": "any"}, 85.99),
        ({"name": "folder", "path": "data/imagenette2-160"}, 75.13),
        ({"name": "folder", "path": "data/ImageNet"}, 76.85),
        ({"name": "folder", "path": "CAMELYON16_patches"}, 70.26),
        ({"name": "slide", "path": "data/CAMELYON16", "labels": "annotations/*.xml"}, 70.26),
        ({"name": "folder", "path": "long/" * 20 + "cifar-10"}, 85.99),
        ({"name": "folder", "path": "/x/cifar100"}, None),
        ({"name": "folder", "path": "/x/CIFAR-100"}, None),
        ({"name": "folder", "path": "tiny-imagenet-200"}, None),
        ({"name": "digits"}, None),
    ],
)
def test_value_of_the_thesis_stands_beside_its_data(tmp_path, data, published):
    data = {**data, "split": "validation"}
    runs = [evaluated_run(tmp_path, LABELS, "int8", data=data)]
    assert [row["published"] for row in evaluation_rows(read_runs(runs))] == [published]


def test_weights_of_4_bits_have_no_value_of_the_thesis(tmp_path):
    """Table 2.2 has 8 bits only: `experiment=table2.2 data=cifar10` showed 85.99 twice."""
    keys = {"data": {"name": "cifar10", "path": "any"}, "quant": {"weights": "int4"}}
    runs = [evaluated_run(tmp_path, LABELS, name, **keys) for name in ("fp32", "int8")]
    shown = {row["precision"]: row["published"] for row in evaluation_rows(read_runs(runs))}
    assert shown == {"fp32": 86.02, "int8": None}


def test_slides_have_the_name_of_their_folder(tmp_path):
    data = {"name": "slide", "path": "data/CAMELYON16", "labels": "labels.csv", "split": "test"}
    [row] = evaluation_rows(read_runs([evaluated_run(tmp_path, LABELS, "fp32", data=data)]))
    assert row["data"] == "CAMELYON16, test"
