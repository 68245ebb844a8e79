"""What follows from data: classes, steps and saved weights; and an evaluation says which of its
images its weights or scales were made with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hires.cli.data_keys import with_classes
from hires.cli.learnt_images import learnt_images
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.store import rundir
from hires.core.store.naming import run_name


def resolved(**keys: Any) -> RunConfig:
    """Returns a config of 10 images with what follows from them."""
    return with_classes(from_dict({"image": 8, "batch": 4, "data": {"length": 10}, **keys}))


@pytest.mark.parametrize(
    ("epochs", "batch", "steps"),
    [(2, 4, 5), (0.5, 4, 2), (1.1, 1, 11)],
)
def test_every_image_is_taken_as_often_as_there_are_epochs(epochs, batch, steps):
    config = resolved(epochs=epochs, batch=batch, measure={"warmup": 0})
    assert (config.steps, config.epochs) == (steps, None)
    # 0.07 of 100 images are 7, though the product of the two numbers is a little more.
    exact = resolved(epochs=0.07, batch=1, data={"length": 100}, measure={"warmup": 0})
    assert exact.steps == 7


def test_run_of_epochs_is_the_run_of_as_many_steps_and_saves_its_weights():
    long = resolved(epochs=40.0)
    assert (long.measure.warmup, resolved(epochs=0.1).measure.warmup) == (2, 0)
    assert run_name(long) == run_name(resolved(steps=100))
    assert long.checkpoint.saves_end
    assert not resolved(epochs=2.0, checkpoint={"at_end": "never"}).checkpoint.saves_end
    # Of a training from real images nothing was left; weights from synthetic ones are of no use.
    keys = {"steps": 5, "data": {"name": "digits"}, "model": {"channels": 1}}
    assert resolved(**keys).checkpoint.saves_end
    assert not resolved(steps=5).checkpoint.saves_end
    assert not resolved(**keys, task={"name": "infer"}).checkpoint.saves_end
    never = resolved(**keys, checkpoint={"at_end": "never"})
    assert not never.checkpoint.saves_end
    assert run_name(never) == run_name(resolved(**keys))


NET = {"name": "unet", "levels": 2, "width": 4, "channels": 1}


DIGITS = {"name": "digits"}


def run_of(folder, data, **keys):
    """Returns the folder of a training that has not begun, and what it reads."""
    config = from_dict({"image": 16, "batch": 4, "steps": 3, "model": NET, "data": data, **keys})
    config = with_classes(dataclasses.replace(config, results=str(folder)))
    return str(rundir.create(config, {}, ["hires", "run"]).path)


def findings_of(weights, data, task="evaluate", **keys):
    values = {"image": 16, "batch": 4, "model": NET, "data": data, "task": {"name": task}, **keys}
    seen = {}
    return learnt_images(with_classes(from_dict({**values, "weights": weights}), seen), seen)


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path, DIGITS, validate={"every": 3})


def test_images_of_the_training_are_counted(run):
    # All 1797 digits were evaluated without a word, 1618 of which the training learns from.
    [finding] = findings_of(f"{run}/best", DIGITS)
    assert (finding.severity, finding.key) == ("warning", "data.split")
    assert "trains with 1618 of the 1797 images that this evaluates" in finding.text
    assert "data.split=train of its run" in finding.text
    assert finding.text.endswith("use data.split=validation")
    [finding] = findings_of(run, DIGITS, "predict")
    assert finding.severity == "note"
    [finding] = findings_of(run, {**DIGITS, "split": "train"})
    assert (finding.severity, "1618 of the 1618" in finding.text) == ("note", True)


def test_other_images_are_no_finding(run, tmp_path):
    assert findings_of(run, {**DIGITS, "split": "validation"}) == []
    assert findings_of(run, {"name": "textures", "length": 40}) == []
    assert findings_of(run, DIGITS, "infer") == []
    [finding] = findings_of("net.safetensors", DIGITS)
    assert (finding.severity, finding.key) == ("note", "data.order")  # it has no names of classes
    made = run_of(tmp_path, {"name": "textures", "length": 40})
    assert findings_of(made, {"name": "textures", "length": 40}, seed=1) == []
    assert "40 of the 40" in findings_of(made, {"name": "textures", "length": 40})[0].text


def test_data_that_is_divided_in_another_way_shares_some_images(run, tmp_path):
    [finding] = findings_of(run, {**DIGITS, "split": "validation", "split_seed": 1})
    count = int(finding.text.partition("trains with ")[2].split()[0])
    assert 0 < count < 179
    assert "use the data.split_file, data.validation" in finding.text
    [finding] = findings_of(run_of(tmp_path / "all", DIGITS), {**DIGITS, "split": "validation"})
    assert "179 of the 179" in finding.text
    assert "train with data.split=train (validate.every sets it)" in finding.text
