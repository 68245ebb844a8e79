"""Is a training evaluated as it goes on, in every layout, and does it act on what it sees?"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from hires.cli.data_keys import with_classes
from hires.cli.screens.show_training import training_lines
from hires.core.epoch_lines import line_text
from hires.core.errors import ConfigError, PlanError
from hires.core.evaluation_summary import CLASSES, PIXELS
from hires.core.store import checkpoints, file_names, records, rundir
from hires.core.store.network_weights import find_weights
from hires.core.store.reading import read_lines
from hires.core.store.step_lines import ENDED_LINE
from hires.engine.validate import Validation
from hires.plan.validation import evaluation_of
from hires.report.tables import tables
from tests.engine.test_evaluate import UNET, expected
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.saved import attempt, killed_attempt, losses

TRAINING = {
    "batch": 4,
    "steps": 6,
    "data": {"length": 40, "classes": 4, "validation": 0.3},
    "image": [16, 16],
    "optimizer": {"lr": 0.05},
    "validate": {"every": 2},
    "checkpoint": {"at_end": "always", "keep": 1},
}


def training(tmp_path, **keys):
    config = config_of(**{**TRAINING, **keys})
    return with_classes(dataclasses.replace(config, results=str(tmp_path)))


def folder_of(config):
    plan = plan_of(config)
    assert plan.ok, plan.findings
    return rundir.create(config, plan.to_dict(), ["hires", "run"]).path


def evaluations(path, *attempts):
    lines = []
    for number in attempts:
        every = read_lines(file_names.attempt_dir(path, number) / "metrics.jsonl")
        lines += [line for line in every if line["kind"] == "validated"]
    return [{k: v for k, v in line.items() if k != "validate_s"} for line in lines]


LAYOUTS = {
    "one process": (CLASSES, {}),
    "tiles": (CLASSES, {"parallel": {"tiles": [2, 1]}}),
    "pixels in tiles": (PIXELS, {**UNET, "parallel": {"tiles": [1, 2]}}),
    "replicas": (CLASSES, {"parallel": {"replicas": 2}}),
    "tiles, then stages in microbatches": (
        CLASSES,
        {"parallel": {"stages": 3, "tiles": [[2, 1], [1, 1], [1, 1]], "microbatches": 2}},
    ),
    "gems": (
        CLASSES,
        {"parallel": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"}},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluations_are_those_of_plain_torch_and_change_no_step(tmp_path, name):
    kind, keys = LAYOUTS[name]
    path = folder_of(training(tmp_path / "a", **keys))
    assert set(attempt(path)) == {0}
    config = records.read_config(path)
    found = evaluations(path, 0)
    assert [line["step"] for line in found] == [1, 3, 5]
    # The last one beside the checkpoint of the end, computed by plain torch in one process.
    last = checkpoints.place(path, 6)
    alone = dataclasses.replace(evaluation_of(config), weights=str(last), results=str(tmp_path))
    alone = dataclasses.replace(alone, parallel=config_of().parallel)
    reference = expected(alone, kind)
    assert found[-1]["top1"] == reference["top1"]
    assert found[-1]["loss"] == pytest.approx(reference["loss"], rel=1e-10)
    assert found[-1]["images"] == 12
    # Without them the same training, bit for bit.
    silent = dataclasses.replace(config, validate=config_of().validate, results=str(tmp_path / "b"))
    other = folder_of(silent)
    assert set(attempt(other)) == {0}
    assert losses(path, 0) == losses(other, 0)


@pytest.mark.dist
def test_killed_training_remembers_its_evaluations(tmp_path):
    keys = {"parallel": {"tiles": [2, 1]}, "checkpoint": {"every": 3, "keep": 1}, "steps": 8}
    keys["measure"] = {"warmup": 0}
    whole = folder_of(training(tmp_path / "a", **keys))
    stopped = folder_of(training(tmp_path / "b", **keys))
    assert attempt(whole) == [0, 0]
    killed_attempt(stopped, 5)
    assert attempt(stopped) == [0, 0]
    every = evaluations(whole, 0)
    again = evaluations(stopped, 1)
    begin = every.index(again[0])
    assert begin > 0  # it did not begin anew
    assert again == every[begin:]
    assert checkpoints.read_best(stopped) == checkpoints.read_best(whole)
    ours, theirs = (records.read_record(one)["validation"] for one in (whole, stopped))
    for one in (ours, theirs):
        one["best"].pop("validate_s"), one["last"].pop("validate_s")
    assert ours == theirs
    assert ours["count"] == 4


def tensors_at(path, step):
    """Returns all that a checkpoint holds: weights, running means, and the optimiser's state."""
    files = sorted(checkpoints.place(path, step).glob("*.safetensors"))
    return {(file.name, key): one for file in files for key, one in load_file(file).items()}


KEPT = {
    "steps": 8,
    "precision": {"name": "fp32"},
    "parallel": {"tiles": [2, 1]},
    "optimizer": {"lr": 0.05, "ema": 0.75},
    "validate": {"every": 2, "weights": "ema"},
    "checkpoint": {"every": 2, "keep": 1},
    "measure": {"warmup": 0},
}
RESNET = {
    "model": {"name": "resnet", "depth": 18, "channels": 1, "classes": None},
    "data": {"name": "digits", "validation": 0.005},
    "image": [32, 32],
}


@pytest.mark.dist
@pytest.mark.parametrize("net", [UNET, pytest.param(RESNET, marks=pytest.mark.slow)])
def test_killed_training_goes_on_bit_for_bit(tmp_path, net):
    # One rank is killed in step 5, and the checkpoint after step 4 is the last one. The command is
    # repeated, or `--continue` makes a longer run of it.
    whole = folder_of(training(tmp_path / "whole", **net, **KEPT))
    assert attempt(whole) == [0, 0]
    repeated = folder_of(training(tmp_path / "repeated", **net, **KEPT))
    killed_attempt(repeated, 5, rank=1)
    assert attempt(repeated) == [0, 0]
    short = folder_of(training(tmp_path / "continued", **net, **{**KEPT, "steps": 7}))
    killed_attempt(short, 5, rank=1)
    saving = {**KEPT["checkpoint"], "continues": str(checkpoints.place(short, 4))}
    keys = {**net, **KEPT, "checkpoint": saving}
    continued = folder_of(training(tmp_path / "continued", **keys))
    assert attempt(continued) == [0, 0]

    rest = {key: loss for key, loss in losses(whole, 0).items() if key[0] >= 4}
    wanted, seen = tensors_at(whole, 8), evaluations(whole, 0)
    assert len(rest) == 8
    names = {name for name, _ in wanted}
    assert {f"{kind}00.safetensors" for kind in ("stage", "ema", "momentum")} <= names
    for path, number in ((repeated, 1), (continued, 0)):
        assert losses(path, number) == rest
        found = tensors_at(path, 8)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], one) for key, one in wanted.items())
        lines = evaluations(path, number), [line for line in seen if line["step"] >= 4]
        if path == continued:  # its search for the best evaluation begins anew
            lines = [[{**line, "better": None} for line in some] for some in lines]
        assert lines[0] == lines[1]


def test_best_checkpoint_is_kept_and_found(tmp_path):
    # The rate is so large that later evaluations are worse.
    path = folder_of(training(tmp_path, steps=12, validate={"every": 1, "metric": "loss"}))
    assert attempt(path) == [0]
    lines = evaluations(path, 0)
    values = [line["loss"] for line in lines]
    best = values.index(min(values)) + 1
    assert [line["better"] for line in lines] == [
        value < min(values[:n], default=float("inf")) for n, value in enumerate(values)
    ]
    assert checkpoints.read_best(path) == checkpoints.Best(best, "loss", min(values))
    kept = {checkpoint.step for checkpoint in checkpoints.whole_checkpoints(path)[0]}
    assert kept == {best, 12}
    assert find_weights(f"{path}/best").path == checkpoints.place(path, best)
    assert find_weights(str(path)).path == checkpoints.place(path, 12)


def test_training_without_progress_ends_early_and_says_why(tmp_path):
    keys = {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "steps": 20}
    wanted = {"every": 2, "metric": "top1", "patience": 2, "min_delta": 0.9}
    path = folder_of(training(tmp_path, **keys, validate=wanted))
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


def test_epochs_end_where_their_last_image_is(tmp_path):
    config = training(tmp_path, validate={"every": "epoch"}, steps=20)  # of 28 images
    path = folder_of(config)
    assert attempt(path) == [0]
    lines = read_lines(file_names.attempt_dir(path, 0) / "metrics.jsonl")
    ends = [line["step"] for line in lines if line["kind"] == "epoch"]
    assert ends == [6, 13]
    assert [line["step"] for line in lines if line["kind"] == "validated"] == [6, 13, 19]
    own = [line["loss"] for line in lines if line["kind"] == "step"]
    means = [line["loss"] for line in lines if line["kind"] == "epoch"]
    assert means == pytest.approx([sum(own[:7]) / 7, sum(own[7:14]) / 7], rel=1e-12)


WRONG = {
    "it is no number of its outputs": ({"every": 2, "metric": "psnr"}, "use one of loss, top1"),
    "it is no number of classes": ({"every": 2, "metric": "ssim"}, "use one of loss, top1"),
    "of 4 classes five are no choice": ({"every": 2, "metric": "top5"}, "use one of loss, top1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metric_that_does_not_fit_is_refused(tmp_path, name):
    keys, words = WRONG[name]
    plan = plan_of(training(tmp_path, validate=keys))
    with pytest.raises(PlanError, match=words):
        plan.require_ok()


def test_windows_of_ssim_need_images_as_large(tmp_path):
    keys = {"model": {"name": "edsr", "blocks": 1, "width": 4, "scale": 2}, "data": {"length": 8}}
    metric = {"every": 2, "metric": "ssim"}
    assert plan_of(training(tmp_path, **keys, image=[6, 6], validate=metric)).ok
    plan = plan_of(training(tmp_path, **keys, image=[5, 6], validate=metric))
    with pytest.raises(PlanError, match="use one of loss, psnr"):
        plan.require_ok()


def test_stages_hold_the_layers_of_the_training(tmp_path):
    # By itself an evaluation would be cut elsewhere: it has no backward pass.
    keys = {"model": {"name": "unet", "levels": 2, "width": 4, "classes": 4}, "image": [32, 32]}
    plan = plan_of(training(tmp_path, **keys, parallel={"stages": 3, "balance": [1, 4, 8]}))
    assert plan.ok, plan.findings
    assert plan.validation is not None
    for stage, other in zip(plan.stages, plan.validation.stages, strict=True):
        names, others = (
            {name for node in one.nodes(stage.index) for name in node.params}
            for one in (plan, plan.validation)
        )
        assert others <= names
        assert stage.num_layers == other.num_layers


@pytest.mark.sampled(1)
@pytest.mark.dist
@pytest.mark.parametrize("parallel", [{}, {"tiles": [2, 1], "replicas": 2}])
def test_running_means_are_evaluated_and_left_alone(tmp_path, parallel):
    keys = {"parallel": parallel, "optimizer": {"lr": 0.05, "ema": 0.5}}
    seen = folder_of(training(tmp_path / "a", **keys, validate={"every": 2, "weights": "ema"}))
    other = folder_of(training(tmp_path / "b", **keys))
    for path in (seen, other):
        assert set(attempt(path)) == {0}
    assert losses(seen, 0) == losses(other, 0)  # the training goes on with its own weights
    means = [load_file(checkpoints.place(path, 6) / "ema00.safetensors") for path in (seen, other)]
    assert means[0].keys() == means[1].keys()
    assert all(torch.equal(means[0][name], means[1][name]) for name in means[0])
    found, of_weights = evaluations(seen, 0)[-1], evaluations(other, 0)[-1]
    config = records.read_config(seen)
    place = f"{checkpoints.place(seen, 6)}/ema"
    alone = dataclasses.replace(evaluation_of(config), weights=place, results=str(tmp_path))
    reference = expected(dataclasses.replace(alone, parallel=config_of().parallel), CLASSES)
    assert found["loss"] == pytest.approx(reference["loss"], rel=1e-10)
    assert found["loss"] != pytest.approx(of_weights["loss"], rel=1e-6)


@pytest.mark.parametrize("optimizer", [{}, {"ema": 0.9, "shard": True}])
def test_means_that_no_rank_holds_are_refused(tmp_path, optimizer):
    with pytest.raises(ConfigError, match=r"validate\.weights=ema .* use optimizer\.ema=0\.999"):
        training(tmp_path, optimizer=optimizer, validate={"every": 2, "weights": "ema"})


@pytest.mark.parametrize("rank", [0, 1])
def test_early_end_is_a_line_in_the_log_of_rank_0(tmp_path, caplog, rank):
    caplog.set_level("INFO")
    validation = Validation.__new__(Validation)
    validation._training = training(tmp_path, validate={"every": 2, "patience": 1})
    validation.metric, validation._rank = "loss", rank
    validation.end_early(6)
    why = "ended early after step 6: no better loss in 1 evaluation (validate.patience)"
    assert [one.getMessage() for one in caplog.records] == [why] * (rank == 0)
