"""Do the evaluations of trainings stand in frames, tables, exports and results of sweeps?"""

from __future__ import annotations

import json

import pytest

from hires.cli.sweep.axes import SweepAxis
from hires.cli.sweep.sweep_points import Points, SweepPoint
from hires.cli.sweep.sweep_results import print_results
from hires.core.store.records import read_config
from hires.report import mlflow_export
from hires.report.frames import load, plain_rows
from hires.report.read.runs import read_runs
from hires.report.summaries import summaries, write_frames
from tests.helpers.compared_runs import compared_run

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


@pytest.fixture
def frames(tmp_path):
    return load([trained_run(tmp_path), compared_run(tmp_path, [[0.5]], batch=8)])


def test_training_has_a_row_for_its_best_and_its_last_evaluation(frames):
    best, last = plain_rows(frames.validations)
    assert [best["evaluation"], last["evaluation"]] == ["best top1", "last"]
    assert [best["done"], last["done"]] == [4, 6]
    assert [best["top1"], last["top1"]] == [0.75, 0.625]
    assert [best["metric"], best["ended_early"]] == ["top1", 6]


def test_report_and_csv_have_them(frames, tmp_path):
    [table] = [one for one in summaries(frames) if one.name == "validations"]
    titles = {column.title for column in table.columns}
    assert {"after step", "top-1", "loss", "ended early at"} <= titles
    assert not {"PSNR", "top-5"} & titles  # nobody has them
    assert len(table.rows) == 2
    assert tmp_path / "out" / "validations.csv" in write_frames(frames, tmp_path / "out")


def test_mlflow_gets_the_best_the_last_and_each_step(tmp_path):
    [run] = read_runs([trained_run(tmp_path)])
    found = mlflow_export._metrics(run, run.complete[0])
    assert ("validation_best_top1", 0.75, 0) in found
    assert ("validation_last_loss", 0.375, 0) in found
    curve = [(step, value) for name, value, step in found if name == "validation_top1"]
    assert curve == [(1, 0.5), (3, 0.75), (5, 0.625)]
    losses = [(step, value) for name, value, step in found if name == "loss"]
    assert losses == [(0, 1.5), (1, 0.5)]  # of two replicas


def test_sweep_over_optimisers_ends_with_what_each_has_learnt(tmp_path, capsys):
    words = [["optimizer=sgd"], ["optimizer=adamw"]]
    shares = {"sgd": TOP1, "adamw": {2: 0.875}}
    listed = []
    for place, name in enumerate(shares):
        run = trained_run(tmp_path, name, shares[name], batch=2)
        listed.append(SweepPoint((place,), words[place], read_config(run), run))
    print_results(Points([SweepAxis(["optimizer"], words)], listed), [], 1, False)
    text = capsys.readouterr().out
    assert "best" in text
    assert "75.00" in text
    assert "87.50" in text
