"""A training is evaluated as it goes on, as plain torch would, and acts on what it sees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hires import comm
from hires.cli.data_keys import resolve_data
from hires.core.config.run_config import RunConfig
from hires.core.errors import PREEMPTED, ConfigError, PlanError
from hires.core.evaluation_summary import PIXELS
from hires.core.ranks.world import World
from hires.core.store import checkpoints, records
from hires.core.store.network_weights import find_weights
from hires.core.store.step_lines import ENDED_LINE, line_text
from hires.engine.epochs import Epochs
from hires.parallel.executor import Executor, StepResult
from hires.plan.planner import evaluation_of, is_better
from tests.helpers.evaluations import UNET, expected
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, lines_of, losses, numbered, run_folder, tensors_at

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
    return resolve_data(config_of(**{**TRAINING, **keys}))


MEANS = {"optimizer": {"lr": 0.05, "ema": 0.5}, "validate": {"every": 2, "weights": "ema"}}


def test_evaluations_are_those_of_plain_torch_and_change_no_step(tmp_path: Path):
    path = run_folder(tmp_path / "a", training(**UNET, **MEANS, parallel={"tiles": [1, 2]}))
    assert attempt(path) == [0, 0]
    config, found = records.read_config(path), lines_of(path, 0, "validated")
    assert [line["step"] for line in found] == [1, 3, 5]

    def alone(weights: str) -> dict[str, Any]:  # by plain torch in one process
        values = {"weights": weights, "results": str(tmp_path), "parallel": config_of().parallel}
        return expected(dataclasses.replace(evaluation_of(config), **values), PIXELS)

    reference = alone(f"{checkpoints.place(path, 6)}/ema")
    assert found[-1]["top1"] == reference["top1"]
    assert found[-1]["loss"] == pytest.approx(reference["loss"], rel=1e-10)
    assert found[-1]["images"] == 12
    weights = alone(str(checkpoints.place(path, 6)))
    assert found[-1]["loss"] != pytest.approx(weights["loss"], rel=1e-6)
    # Without them the same training, bit for bit.
    silent = dataclasses.replace(config, validate=config_of().validate)
    other = run_folder(tmp_path / "b", silent)
    assert attempt(other) == [0, 0]
    assert losses(path, 0) == losses(other, 0)
    ours, theirs = tensors_at(path, 6), tensors_at(other, 6)
    assert ours.keys() == theirs.keys()
    assert all(map(torch.equal, ours.values(), theirs.values()))


def test_best_checkpoint_is_kept_and_found(tmp_path: Path):
    # The rate is so large that later evaluations are worse.
    validate = {"every": 1, "metric": "loss"}
    path = run_folder(tmp_path, training(steps=9, validate=validate, optimizer={"lr": 2.0}))
    assert attempt(path) == [0]
    lines = lines_of(path, 0, "validated")
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


def recorders(world: World, folder: str) -> list[bool]:
    """Runs an attempt; returns whether the rank's status is of the step that runs, for each."""
    seen, whole = list[bool](), Executor.step

    def step(executor: Executor, *args: Any, **keys: Any) -> StepResult:
        seen.append(comm.activity.recorder is executor.recorder)
        return whole(executor, *args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "step", step)
        assert numbered(world, folder, 0) == 0
    return seen


def test_status_of_a_rank_is_of_the_step_that_runs(tmp_path: Path):
    path = run_folder(tmp_path, training())
    evaluations = 3 * 3  # of 12 images each
    assert run_ranks(recorders, 1, str(path)) == [[True] * (6 + evaluations)]


def test_training_without_progress_ends_early_and_says_why(tmp_path: Path):
    keys = {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "steps": 20}
    wanted = {"every": 2, "metric": "top1", "patience": 2, "min_delta": 0.9}
    path = run_folder(tmp_path, training(**keys, validate=wanted))
    assert attempt(path) == [0]
    record = records.read_record(path)
    assert record["state"] == "done"
    assert (record["validation"]["ended_early"], record["validation"]["count"]) == (6, 3)
    why = "ended early after step 6: no better top1 in 2 evaluations (validate.patience)"
    assert [line_text(line) for line in lines_of(path, 0, ENDED_LINE)] == [why]
    assert {step for step, _ in losses(path, 0)} == set(range(6))
    assert {c.step for c in checkpoints.whole_checkpoints(path)[0]} == {2, 6}


def test_equal_evaluation_is_no_better_one():
    config = training()
    for metric, better in (("top1", [False, False, True]), ("loss", [True, False, False])):
        assert [is_better(config, metric, value, 0.5) for value in (0.4, 0.5, 0.6)] == better


def test_epochs_end_where_their_last_image_is(tmp_path: Path):
    data = {**TRAINING["data"], "prefetch": 0}  # of 28 images
    path = run_folder(tmp_path, training(validate={"every": "epoch"}, steps=15, data=data))
    assert attempt(path) == [0]
    epochs, validated = (lines_of(path, 0, kind) for kind in ("epoch", "validated"))
    assert [line["step"] for line in epochs] == [6, 13]
    assert [line["step"] for line in validated] == [6, 13, 14]
    each = [line["loss"] for line in lines_of(path, 0, "step")]
    means = [line["loss"] for line in epochs]
    assert means == pytest.approx([sum(each[:7]) / 7, sum(each[7:14]) / 7], rel=1e-12)
    waits_s = [line["data_s"] for line in lines_of(path, 0, "step")]  # of each step alone
    assert min(waits_s) > 0
    assert waits_s != sorted(waits_s)


def test_each_epoch_has_its_own_seconds(monkeypatch: pytest.MonkeyPatch):
    clock_s = 100.0
    monkeypatch.setattr("hires.engine.epochs.time", SimpleNamespace(perf_counter=lambda: clock_s))
    counted, noted = Epochs(training(steps=9), 12, 0), []
    for step in range(6):
        clock_s += step
        noted.append(counted.add(step, float(step)))
    first, second = filter(None, noted)
    assert (first["epoch_s"], first["left_s"]) == (0 + 1 + 2, 3 * 2.0)
    assert (second["epoch_s"], second["left_s"]) == (3 + 4 + 5, 12 * 1.0)


@pytest.mark.parametrize("stops", [(9,), (3, 5)])  # in its second epoch, and twice in its first
def test_epoch_of_a_resumed_training_counts_the_steps_before(tmp_path: Path, stops: tuple[int]):
    keys = {"validate": {}, "steps": 14, "parallel": {"replicas": 2}, "checkpoint": {"every": 1}}
    keys["data"] = {**TRAINING["data"], "length": 28}
    whole, stopped = (run_folder(tmp_path / name, training(**keys)) for name in "ab")
    assert attempt(whole) == [0, 0]
    for step in stops:
        assert attempt(stopped, stop_at=step) == [PREEMPTED, PREEMPTED]
    assert attempt(stopped) == [0, 0]
    expected_lines = lines_of(whole, 0, "epoch")
    numbers = range(len(stops) + 1)
    noted = [line for number in numbers for line in lines_of(stopped, number, "epoch")]
    assert [line["step"] for line in noted] == [6, 13]
    means = [line["loss"] for line in expected_lines]
    assert [line["loss"] for line in noted] == pytest.approx(means, rel=1e-12)
    steps = [line for number in numbers for line in lines_of(stopped, number, "step")]
    for line, first in zip(noted, (0, 7), strict=True):
        of_rank_0 = [one for one in steps if not one["rank"] and first <= one["step"] < first + 7]
        assert line["epoch_s"] >= sum(one["step_s"] for one in of_rank_0)


PAIRS = {
    "model": {"name": "edsr", "blocks": 1, "width": 4, "scale": 2},
    "data": {"length": 8, "validation": 0.3},
}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "ssim", "use one of loss, top1"),
    ({}, "top5", "use one of loss, top1"),  # of four classes
    ({**PAIRS, "image": [5, 6]}, "ssim", "use one of loss, psnr"),  # below a window
]


@pytest.mark.parametrize(("keys", "metric", "words"), WRONG)
def test_metric_that_does_not_fit_is_refused(keys: dict[str, Any], metric: str, words: str):
    with pytest.raises(PlanError, match=words):
        plan_of(training(**keys, validate={"every": 2, "metric": metric})).require_ok()


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


def test_means_that_no_rank_holds_are_refused():
    with pytest.raises(ConfigError, match=r"validate\.weights=ema .* use optimizer\.ema=0\.999"):
        training(validate={"every": 2, "weights": "ema"})
