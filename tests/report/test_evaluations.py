"""Evaluations stand beside the most exact one of the same images, and in every table and export."""

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
from hires.report.summaries import summaries, write_frames
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
        evaluated_run(tmp_path, exact, "int8", 0.6, quant={"linear": "dynamic", "images": 64}),
    ]


def shown(table):
    """Returns the rows of a table by the keys of its columns."""
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def test_difference_is_that_of_the_accuracies_with_an_interval_of_pairs(runs):
    exact, low, same = rows = [*evaluation_rows(read_runs(runs))]
    assert [row["reference"] for row in rows] == [None, "fp32", "fp32"]
    assert [exact[key] for key in ("agreement", "difference", "difference_low")] == [None] * 3
    assert low["agreement"] == 0.88
    assert low["difference"] == pytest.approx(-0.08)
    assert (low["difference_low"], low["difference_high"]) == paired_difference(2, 10, 100)
    assert (same["agreement"], same["difference"]) == (1, 0)
    assert [row["quant"] for row in rows] == [None, None, "images=64, linear=dynamic"]


def test_report_and_tables_of_a_campaign_tell_keys_of_quant_apart(runs):
    # Two panels of the confusions were titled `single int8`, and the figure and the table of
    # precisions were of trainings only.
    held = frames.load(runs)
    labels = [run.label for run, _ in PlotData(held).confusions]
    assert labels == ["single fp32", "single int8", "single int8 images=64, linear=dynamic"]
    plots = {plot.name: plot for plot in draw(PlotData(held))}
    assert "linear=dynamic: 85 % right" in plots["confusion"].caption
    caption = plots["precision_error"].caption
    assert "int8 2.0e-02 beside fp32 (evaluation)" in caption
    assert "int8 images=64, linear=dynamic 2.0e-01 beside fp32 (evaluation)" in caption
    made = {table.name: table for table in summaries(held)}
    rows = shown(made["precision"])
    assert [row["loss"] for row in rows] == [0.5, 0.51, 0.6]
    assert [row["loss_error"] for row in rows] == [None, pytest.approx(0.02), pytest.approx(0.2)]
    assert [row["top1"] for row in rows] == [0.9] * 3
    assert "same class as fp32 [%]" in [one.heading for one in made["evaluations"].columns]
    shutil.copytree(runs[2] / "a0", runs[2] / "a1")
    for path in (runs[2], runs[2] / "a1"):
        record = json.loads((path / "record.json").read_text())
        (path / "record.json").write_text(json.dumps({**record, "attempt": 1}))
    points = [PlannedPoint(run.name, [], 2) for run in runs]
    table = campaign_tables(runs[0].parent, Campaign("c", points=points))[0]
    rows = shown(table)
    assert table.name == "accuracy"
    assert [row["attempt"] for row in rows] == [0, 0, 0, 1]
    assert [row["quant"] for row in rows] == [None, None, *["images=64, linear=dynamic"] * 2]
    assert [row["agreement"] for row in rows] == [None, 0.88, None, 1.0]
    assert [row["difference"] for row in rows] == [None, pytest.approx(-0.08), None, 0]
    assert "same class as fp32 [%]" in table.to_markdown()


def test_runs_that_no_column_tells_apart_have_their_hash(tmp_path):
    runs = [evaluated_run(tmp_path, LABELS, "int8", seed=n) for n in (1, 2)]
    held = frames.load(runs)
    labels = [run.label for run, _ in PlotData(held).confusions]
    assert labels == [f"single {run.short}" for run in held.run_list]


TOP1 = {2: 0.5, 4: 0.75, 6: 0.625}
"""Steps that were done -> what an evaluation found."""


def trained_run(results, optimizer="sgd", top1=TOP1, **changes):
    """Makes the folder of a training that was evaluated every two steps."""
    run = compared_run(results, [[0.5] * 3], optimizer={"name": optimizer}, **changes)
    lines = [
        {"step": done - 1, "rank": 0, "loss": 1 - share, "top1": share, "metric": "top1"}
        for done, share in top1.items()
    ]
    best = max(lines, key=lambda line: line["top1"])
    facts = {"metric": "top1", "count": 3, "ended_early": 6, "best": best, "last": lines[-1]}
    for path in (run, run / "a0"):
        record = json.loads((path / "record.json").read_text())
        record["validation"] = facts
        (path / "record.json").write_text(json.dumps(record))
    steps = [
        {"kind": "step", "step": n, "rank": rank, "loss": 2.0 - n - rank}
        for n in range(2)
        for rank in range(2)
    ]
    held = [*steps, *({"kind": "validated", **line} for line in lines)]
    (run / "a0" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in held))
    return run


def test_training_has_a_row_for_its_best_and_its_last_evaluation_everywhere(tmp_path):
    run = trained_run(tmp_path)
    held = frames.load([run, compared_run(tmp_path, [[0.5]], batch=8)])
    best, last = frames.plain_rows(held.validations)
    assert [best["evaluation"], last["evaluation"]] == ["best top1", "last"]
    assert [best["done"], last["done"]] == [4, 6]
    assert [best["top1"], last["top1"]] == [0.75, 0.625]
    assert [best["metric"], best["ended_early"]] == ["top1", 6]
    [table] = [one for one in summaries(held) if one.name == "validations"]
    titles = {column.title for column in table.columns}
    assert {"after step", "top-1", "loss", "ended early at"} <= titles
    assert not {"PSNR", "top-5"} & titles  # nobody has them
    assert len(table.rows) == 2
    assert tmp_path / "out" / "validations.csv" in write_frames(held, tmp_path / "out")
