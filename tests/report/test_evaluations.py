"""Evaluations stand beside the most exact one of the same images, and in every table and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.core.evaluation_summary import paired_difference
from hires.core.store.campaign import Campaign, PlannedPoint
from hires.data.content import HAS_FILES
from hires.report import tables
from hires.report.evaluations import classes, data_label, evaluations, predictions
from hires.report.plots.base import PlotData, draw
from hires.report.runs import Run, find
from tests.helpers.compared_runs import compared_run
from tests.helpers.report_runs import change

LABELS = [0, 1, 2, 3] * 25


def evaluated_run(results, predicted, precision, loss=0.5, labels=LABELS, **changes):
    """Makes the folder of an evaluation that predicted these classes."""
    changes = {"task": {"name": "evaluate"}, "weights": "net.pt", **changes}
    run = compared_run(results, [[0.5] * 3], precision={"name": precision}, **changes)
    evaluation = {"images": len(predicted), "top1": 0.9, "loss": loss}
    change(run, evaluation=evaluation, loss=None)  # a pass in inference writes none of its steps
    samples = {"id": [*range(len(predicted))], "label": labels, "predicted": predicted}
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
        evaluated_run(tmp_path, exact, "int8", 0.6, quant={"linear": "dynamic", "images": 64}),
    ]


def shown(table):
    """Returns the rows of a table by the keys of its columns."""
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def test_difference_is_that_of_the_accuracies_with_an_interval_of_pairs(runs, tmp_path):
    exact, low, same = [*evaluations(find(runs))]
    assert [row["reference"] for row in (exact, low, same)] == [None, "fp32", "fp32"]
    assert [exact.get(key) for key in ("agreement", "difference", "difference_low")] == [None] * 3
    assert low["agreement"] == 0.88
    assert low["difference"] == pytest.approx(-0.08)
    assert (low["difference_low"], low["difference_high"]) == paired_difference(2, 10, 100)
    assert (same["agreement"], same["difference"]) == (1, 0)
    others = evaluated_run(tmp_path / "others", LABELS, "bf16", labels=[*LABELS[1:], 3])
    [_, row] = evaluations(find([runs[0], others]))
    assert (row["reference"], row.get("agreement")) == ("fp32", None)


def test_only_what_is_complete_has_a_row_with_its_time_of_a_megapixel(tmp_path):
    evaluation = evaluated_run(tmp_path, LABELS, "fp32")
    prediction = compared_run(tmp_path, [[0.5] * 3], task={"name": "predict"}, image=[100, 50])
    change(prediction, prediction={"kind": "classes", "images": 8})
    [row] = predictions(find([prediction]))
    assert row["s_per_mp"] == 0.5 / (4 * 100 * 50 / 1e6)  # of 4 images a step
    change(evaluation, evaluation={"classes": [{"class": 0}]})
    for run, rows in ((evaluation, classes), (prediction, predictions)):
        assert len([*rows(find([run]))]) == 1
        change(run, "record.json", "a0/record.json", "a0/exit.json", state="failed")
        assert not [*rows(find([run]))]


def test_report_and_tables_of_a_campaign_tell_keys_of_quant_apart(runs):
    # Two panels of the confusions were titled `single int8`, and the figure and the table of
    # precisions were of trainings only.
    loaded, quant = tables.load(runs), "images=64, linear=dynamic"
    plots = {plot.name: plot for plot in draw(PlotData(loaded))}
    axes = plots["confusion"].figure.axes[:3]
    labels = [axis.get_title(loc="left").replace("\n", " ") for axis in axes]
    assert labels == ["single fp32", "single int8", f"single int8 {quant}"]
    assert axes[0].images[0].get_array().tolist() == [[0.9, 0.1], [0.2, 0.8]]  # of each row
    texts = {text.get_text(): text.get_position() for text in axes[0].texts}
    assert texts == {"90": (0, 0), "10": (1, 0), "20": (0, 1), "80": (1, 1)}  # column, row
    [axis] = plots["precision_error"].figure.axes
    names = [label.get_text().replace("\n", " ") for label in axis.get_xticklabels()]
    assert f"int8 {quant}" in names
    every = {table.name: table for table in tables.tables(loaded.found)}
    rows = shown(every["precision"])
    assert [row["loss_error"] for row in rows] == [None, pytest.approx(0.02), pytest.approx(0.2)]
    assert "same class [%]" in [one.heading for one in every["evaluations"].columns]
    points = [PlannedPoint(run.name, [], 1) for run in runs]
    table = tables.campaign_tables(runs[0].parent, Campaign("c", points=points))[0]
    rows = shown(table)
    assert [row["quant"] for row in rows] == [None, None, quant]
    assert [row["agreement"] for row in rows] == [None, 0.88, 1.0]


@pytest.mark.parametrize("name", sorted(HAS_FILES))
def test_data_of_files_is_named_by_its_folder(name):
    known = "cifar10" if name == "cifar10" else "liver"
    for split, label in (("test", f"{known}, test"), ("all", known), (None, known)):
        data = {"name": name, "path": "/data/liver", "split": split}
        assert data_label(Run(Path("run"), {"data": data})) == label


def test_training_has_a_row_for_its_best_and_its_last_evaluation(tmp_path):
    run = compared_run(tmp_path, [[0.5] * 3], optimizer={"name": "sgd"})
    best, last = ({"step": n, "loss": 0.5, "top1": n / 4, "metric": "top1"} for n in (3, 2))
    facts = {"metric": "top1", "count": 3, "ended_early": 6, "best": best, "last": last}
    change(run, validation=facts)
    loaded = tables.load([run, compared_run(tmp_path, [[0.5]], batch=8)])
    rows = tables.plain_rows(loaded.validations)
    assert [(row["evaluation"], row["done"], row["top1"]) for row in rows] == [
        ("best top1", 4, 0.75), ("last", 3, 0.5),
    ]  # fmt: skip
    [table] = [one for one in tables.tables(loaded.found) if one.name == "validations"]
    titles = {column.title for column in table.columns}
    assert {"after step", "top-1", "loss", "ended early at"} <= titles
    assert not {"PSNR", "top-5"} & titles  # no run has them
    assert tmp_path / "out" / "validations.csv" in tables.write_frames(loaded, tmp_path / "out")
