"""What follows from data: classes, steps and saved weights; and an evaluation says which of its
images its weights or scales were made with."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest

from hires.cli.calibration import origin_of
from hires.cli.data_keys import with_classes
from hires.cli.learnt_images import learnt_images
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.store import rundir
from hires.core.store.naming import run_name
from hires.quant.affine import Affine
from hires.quant.scales import Scales, write_scales


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


SCALES = Scales("0" * 16, "entropy", 64, {"input": Affine(0.1, 128)}, {"input": (-12.8, 12.7)})


def int8_of(path, data, trained=None, scales=SCALES, **keys):
    """Returns keys that evaluate with scales that were calibrated on some data."""
    own = {"image": 16, "model": NET, "data": data, "task": {"name": "calibrate"}, **keys}
    origin = origin_of(from_dict({**own, "weights": trained and f"{trained}/best"}))
    write_scales(path, dataclasses.replace(scales, origin=origin))
    return {"precision": {"name": "int8"}}


def test_quantised_weights_remember_their_training(run, tmp_path):
    # The file held nothing of the run that it was made from, so no evaluation of it said a word.
    file = tmp_path / "n8.safetensors"
    whole = dataclasses.replace(SCALES, weights="1" * 16)
    int8 = int8_of(tmp_path / "n8.json", {**DIGITS, "split": "train"}, run, whole)
    shutil.rmtree(run)
    training, calibration = findings_of(str(file), DIGITS, **int8)
    assert training.severity == "warning"
    assert f"weights={file} was quantised from {run}/best, whose run trains" in training.text
    assert "1618 of the 1797 images" in training.text
    assert "calibrated on 64 of the 1797 images" in calibration.text
    training, calibration = findings_of(str(file), {**DIGITS, "split": "train"}, **int8)
    assert (training.severity, calibration.severity) == ("note", "note")
    assert findings_of(str(file), {**DIGITS, "split": "validation"}, **int8) == []


HOSTILE = [
    {"calibration": 7},
    {"calibration": {"image": [2**53, 1], "data": {"name": "digits", "split": "later"}}},
    {"calibration": {"image": 16, "data": {"name": "digits", "path": "~nobody-of-that-name/x"}}},
    {"calibration": {"\x1b[2J": 1}, "training": {"data": {"path": "\0"}}},
    {"training": {"data": {"name": "digits", "split_seed": 1}}, "weights": "\x1b[2J"},
]


def test_wrong_facts_of_a_calibration_are_left_out(tmp_path):
    file = tmp_path / "n8.safetensors"
    for origin in HOSTILE:
        scales = dataclasses.replace(SCALES, weights="1" * 16, images=2**60, origin=origin)
        write_scales(tmp_path / "n8.json", scales)
        int8 = {"precision": {"name": "int8"}}
        for finding in findings_of(str(file), {**DIGITS, "split": "validation"}, **int8):
            assert finding.text.isprintable()
