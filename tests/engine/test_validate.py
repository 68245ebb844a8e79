"""A training is evaluated as it goes on, as plain torch would, and acts on what it sees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from hires.cli.data_keys import with_classes
from hires.cli.screens.show_training import training_lines
from hires.core.config.run_config import RunConfig
from hires.core.epoch_lines import line_text
from hires.core.errors import ConfigError, PlanError
from hires.core.evaluation_summary import CLASSES, PIXELS
from hires.core.store import checkpoints, file_names, records
from hires.core.store.network_weights import find_weights
from hires.core.store.reading import read_lines
from hires.core.store.step_lines import ENDED_LINE
from hires.plan.validation import evaluation_of
from hires.report.tables import tables
from tests.helpers.evaluations import GEMS, UNET, expected, run_folder
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.saved import attempt, losses, tensors_at

pytestmark = pytest.mark.dist

TRAINING: dict[str, Any] = {
    "batch": 4,
    "steps": 6,
    "data": {"length": 40, "classes": 4, "validation": 0.3},
    "image": [16, 16],
    "optimizer": {"lr": 0.05},
    "validate": {"every": 2},
    "checkpoint": {"at_end": "always", "keep": 1},
}


def training(**keys: Any) -> RunConfig:
    return with_classes(config_of(**{**TRAINING, **keys}))


def evaluations(path: Path) -> list[dict[str, Any]]:
    every = read_lines(file_names.attempt_dir(path, 0) / "metrics.jsonl")
    return [line for line in every if line["kind"] == "validated"]


MEANS = {"optimizer": {"lr": 0.05, "ema": 0.5}, "validate": {"every": 2, "weights": "ema"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gems": (CLASSES, {"parallel": GEMS}),
    "pixels in tiles, running means": (PIXELS, {**UNET, **MEANS, "parallel": {"tiles": [1, 2]}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluations_are_those_of_plain_torch_and_change_no_step(tmp_path: Path, name: str):
    kind, keys = LAYOUTS[name]
    path = run_folder(tmp_path / "a", training(**keys))
    assert set(attempt(path)) == {0}
    config, found = records.read_config(path), evaluations(path)
    assert [line["step"] for line in found] == [1, 3, 5]
    # The last one beside the checkpoint of the end, computed by plain torch in one process.
    ema = config.validate.weights == "ema"
    weights = f"{checkpoints.place(path, 6)}{'/ema' if ema else ''}"
    alone = dataclasses.replace(evaluation_of(config), weights=weights, results=str(tmp_path))
    alone = dataclasses.replace(alone, parallel=config_of().parallel)
    reference = expected(alone, kind)
    assert found[-1]["top1"] == reference["top1"]
    assert found[-1]["loss"] == pytest.approx(reference["loss"], rel=1e-10)
    assert found[-1]["images"] == 12
    if ema:  # of the weights it would be another
        alone = dataclasses.replace(alone, weights=str(checkpoints.place(path, 6)))
        assert found[-1]["loss"] != pytest.approx(expected(alone, kind)["loss"], rel=1e-6)
    if not ema:
        return
    # Without them the same training, bit for bit.
    silent = dataclasses.replace(config, validate=config_of().validate)
    other = run_folder(tmp_path / "b", silent)
    assert set(attempt(other)) == {0}
    assert losses(path, 0) == losses(other, 0)
    ours, theirs = tensors_at(path, 6), tensors_at(other, 6)
    assert ours.keys() == theirs.keys()
    assert all(map(torch.equal, ours.values(), theirs.values()))


def test_best_checkpoint_is_kept_and_found(tmp_path: Path):
    # The rate is so large that later evaluations are worse.
    validate = {"every": 1, "metric": "loss"}
    path = run_folder(tmp_path, training(steps=9, validate=validate, optimizer={"lr": 2.0}))
    assert attempt(path) == [0]
    lines = evaluations(path)
    values = [line["loss"] for line in lines]
    best = values.index(min(values)) + 1
    assert best < 9
    assert [line["better"] for line in lines] == [
        value < min(values[:n], default=float("inf")) for n, value in enumerate(values)
    ]
    assert checkpoints.read_best(path) == checkpoints.Best(best, "loss", min(values))
    kept = {checkpoint.step for checkpoint in checkpoints.whole_checkpoints(path)[0]}
    assert kept == {best, 9}
    assert find_weights(f"{path}/best").path == checkpoints.place(path, best)
    assert find_weights(str(path)).path == checkpoints.place(path, 9)


def test_training_without_progress_ends_early_and_says_why(tmp_path: Path):
    keys = {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "steps": 20}
    wanted = {"every": 2, "metric": "top1", "patience": 2, "min_delta": 0.9}
    path = run_folder(tmp_path, training(**keys, validate=wanted))
    assert attempt(path) == [0]
    record = records.read_record(path)
    assert record["state"] == "done"
    assert record["validation"]["ended_early"] == 6
    assert record["validation"]["count"] == 3
    why = "ended early after step 6: no better top1 in 2 evaluations (validate.patience)"
    assert why in training_lines(record, path)
    lines = read_lines(path / "a0" / "metrics.jsonl")
    assert [line_text(line) for line in lines if line["kind"] == ENDED_LINE] == [why]
    assert {step for step, _ in losses(path, 0)} == set(range(6))
    assert {c.step for c in checkpoints.whole_checkpoints(path)[0]} == {2, 6}
    [table] = [table for table in tables(record) if table.name == "validation"]
    assert [row[:2] for row in table.rows] == [["best top1", 2], ["last", 6]]


def test_epochs_end_where_their_last_image_is(tmp_path: Path):
    config = training(validate={"every": "epoch"}, steps=20)  # of 28 images
    path = run_folder(tmp_path, config)
    assert attempt(path) == [0]
    lines = read_lines(file_names.attempt_dir(path, 0) / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "epoch"] == [6, 13]
    assert [line["step"] for line in lines if line["kind"] == "validated"] == [6, 13, 19]
    each = [line["loss"] for line in lines if line["kind"] == "step"]
    means = [line["loss"] for line in lines if line["kind"] == "epoch"]
    assert means == pytest.approx([sum(each[:7]) / 7, sum(each[7:14]) / 7], rel=1e-12)


PAIRS = {
    "model": {"name": "edsr", "blocks": 1, "width": 4, "scale": 2},
    "data": {"length": 8, "validation": 0.3},
}
WRONG = {
    "ssim of classes": ({}, {"metric": "ssim"}, "use one of loss, top1"),
    "five of four classes": ({}, {"metric": "top5"}, "use one of loss, top1"),
    "ssim of images below a window": (
        {**PAIRS, "image": [5, 6]}, {"metric": "ssim"}, "use one of loss, psnr"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_metric_that_does_not_fit_is_refused(name: str):
    keys, validate, words = WRONG[name]
    plan = plan_of(training(**keys, validate={"every": 2, **validate}))
    with pytest.raises(PlanError, match=words):
        plan.require_ok()


def test_stages_of_an_evaluation_hold_the_layers_of_the_training():
    # By itself an evaluation would be cut elsewhere: it has no backward pass.
    keys = {"model": {"name": "unet", "levels": 2, "width": 4, "classes": 4}, "image": [32, 32]}
    plan = plan_of(training(**keys, parallel={"stages": 3, "balance": [1, 4, 8]}))
    assert plan.ok, plan.findings
    assert plan.validation is not None
    for stage, other in zip(plan.stages, plan.validation.stages, strict=True):
        names, others = (
            {name for node in one.nodes(stage.index) for name in node.params}
            for one in (plan, plan.validation)
        )
        assert others <= names
        assert stage.num_layers == other.num_layers


@pytest.mark.parametrize("optimizer", [{}, {"ema": 0.9, "shard": True}])
def test_means_that_no_rank_holds_are_refused(optimizer: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"validate\.weights=ema .* use optimizer\.ema=0\.999"):
        training(optimizer=optimizer, validate={"every": 2, "weights": "ema"})
