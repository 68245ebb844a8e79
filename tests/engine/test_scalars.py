"""Are the numbers that TensorBoard shows those of the run's own lines, in every layout?"""

from __future__ import annotations

import dataclasses

import pytest

from hires.cli.data_keys import with_classes
from hires.core.store import file_names, rundir
from hires.core.store.reading import read_lines
from hires.data.textures import make_folder
from hires.engine.scalars import FOLDER
from hires.plan import hardware
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.saved import attempt, killed_attempt, mean_losses

KEYS = {
    "batch": 4, "steps": 4, "image": [16, 16], "measure": {"tensorboard": True, "warmup": 0},
    "data": {"length": 20, "classes": 4, "validation": 0.3}, "validate": {"every": 2},
    "optimizer": {"clip_norm": 1.0}, "lr_schedule": {"name": "cosine"},
}  # fmt: skip


def folder_of(tmp_path, **keys):
    config = with_classes(config_of(**{**KEYS, **keys}))
    config = dataclasses.replace(config, results=str(tmp_path))
    plan = plan_of(config)
    assert plan.ok, plan.findings
    return rundir.create(config, plan.to_dict(), ["hires", "run"]).path


def shown(path):
    """Returns name -> steps and numbers, as TensorBoard reads them."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs hires[tensorboard]"
    )
    events = accumulator.EventAccumulator(str(path / FOLDER))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in names}


@pytest.mark.dist
def test_numbers_are_those_of_the_metrics(tmp_path):
    path = folder_of(tmp_path, parallel={"stages": 2, "tiles": [[2, 1], [1, 1]]})
    assert set(attempt(path)) == {0}
    found = shown(path)
    losses = [(step, pytest.approx(loss)) for step, loss in enumerate(mean_losses(path, 0))]
    assert found["train/loss"] == losses
    lines = read_lines(file_names.attempt_dir(path, 0) / "metrics.jsonl")
    own = [line for line in lines if line["kind"] == "step" and line["rank"] == 0]
    for key in ("lr", "grad_norm"):
        expected = [(line["step"], pytest.approx(line[key])) for line in own]
        assert found[f"train/{key}"] == expected
    assert len(found["train/images_per_s"]) == 4
    validated = [line for line in lines if line["kind"] == "validated"]
    for metric in ("top1", "mean_recall"):
        expected = [(line["step"], pytest.approx(line[metric])) for line in validated]
        assert found[f"validation/{metric}"] == expected


@pytest.mark.dist
def test_each_metric_of_an_evaluation_is_shown(tmp_path):
    # Of pairs it was looked up under a name that no summary has.
    make_folder(tmp_path / "images", classes=1, count=6, size=[32, 32], seed=0)
    data = {"name": "pairs", "path": str(tmp_path / "images"), "validation": 0.34}
    keys = {"model": {"name": "edsr", "blocks": 1, "width": 4, "scale": 2}, "data": data}
    metrics = {"loss", "psnr", "ssim"}
    path = folder_of(tmp_path / "runs", **keys)
    assert attempt(path) == [0]
    assert {n for n in shown(path) if "validation" in n} == {f"validation/{n}" for n in metrics}


@pytest.mark.dist
def test_attempt_that_goes_on_hides_what_was_behind_its_checkpoint(tmp_path):
    keys = {"checkpoint": {"every": 2}, "steps": 6, "parallel": {"tiles": [2, 1]}}
    path = folder_of(tmp_path, **keys)
    killed_attempt(path, 3)
    assert attempt(path) == [0, 0]
    assert [step for step, _ in shown(path)["train/loss"]] == [0, 1, 2, 3, 4, 5]


def test_missing_package_is_named_before_a_rank_starts(monkeypatch):
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    [finding] = hardware.check_hardware(config_of(measure={"tensorboard": True}))
    assert "pip install 'hires[tensorboard]'" in finding.text
    assert not [*hardware.check_hardware(config_of())]
