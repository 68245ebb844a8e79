"""Does an evaluation say which of its images its weights were trained with?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hires.cli.data_keys import with_classes
from hires.cli.learnt_images import learnt_images
from hires.core.config.run_config import from_dict
from hires.core.store import rundir

NET = {"name": "unet", "levels": 2, "width": 4, "channels": 1}
DIGITS = {"name": "digits"}


def run_of(folder, data, **keys):
    """Returns the folder of a training that has not begun, and what it reads."""
    config = from_dict({"image": 16, "batch": 4, "steps": 3, "model": NET, "data": data, **keys})
    config = with_classes(dataclasses.replace(config, results=str(folder)))
    return str(rundir.create(config, {}, ["hires", "run"]).path)


def found(weights, data, task="evaluate", **keys):
    values = {"image": 16, "batch": 4, "model": NET, "data": data, "task": {"name": task}, **keys}
    seen = {}
    return learnt_images(with_classes(from_dict({**values, "weights": weights}), seen), seen)


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path, DIGITS, validate={"every": 3})


def test_images_of_the_training_are_counted(run):
    # All 1797 digits were evaluated without a word, 1618 of which the training learns from.
    [finding] = found(f"{run}/best", DIGITS)
    assert (finding.severity, finding.key) == ("warning", "data.split")
    assert "trains with 1618 of the 1797 images that this evaluates" in finding.text
    assert "data.split=train of its run" in finding.text
    assert finding.text.endswith("use data.split=validation")
    [finding] = found(run, DIGITS, "predict")
    assert finding.severity == "note"
    [finding] = found(run, {**DIGITS, "split": "train"})
    assert (finding.severity, "1618 of the 1618" in finding.text) == ("note", True)


def test_other_images_are_no_finding(run, tmp_path):
    assert found(run, {**DIGITS, "split": "validation"}) == []
    assert found(run, {"name": "textures", "length": 40}) == []
    assert found(run, DIGITS, "infer") == []
    assert found("net.safetensors", DIGITS) == []
    made = run_of(tmp_path, {"name": "textures", "length": 40})
    assert found(made, {"name": "textures", "length": 40}, seed=1) == []
    assert "40 of the 40" in found(made, {"name": "textures", "length": 40})[0].text


def test_data_that_is_divided_in_another_way_shares_some_images(run):
    [finding] = found(run, {**DIGITS, "split": "validation", "split_seed": 1})
    count = int(finding.text.partition("trains with ")[2].split()[0])
    assert 0 < count < 179
    assert "use the data.split_file, data.validation" in finding.text


def test_training_of_all_images_leaves_none_to_evaluate(tmp_path):
    run = run_of(tmp_path, DIGITS)
    [finding] = found(run, {**DIGITS, "split": "validation"})
    assert "179 of the 179" in finding.text
    assert "train with data.split=train (validate.every sets it)" in finding.text


def test_folder_of_its_own_parts_is_divided_by_them(tmp_path, monkeypatch):
    from hires.data.textures import make_folder

    for part, count in (("train", 3), ("val", 2)):
        make_folder(tmp_path / "images" / part, classes=2, count=count, size=[16, 16], seed=0)
    data = {"name": "folder", "path": str(tmp_path / "images"), "split": "train"}
    run = run_of(tmp_path, data)
    monkeypatch.chdir(tmp_path)
    held = {**data, "path": "images", "split": "validation", "split_seed": 3}
    assert found(run, held) == []  # both parts have a file of every name
    assert "3 of the 3" in found(run, {**held, "split": "train"})[0].text


@pytest.mark.slow
@pytest.mark.dist
def test_evaluation_plan_and_sweep_say_so(hires):
    net = "model=unet", "model.levels=2", "model.width=4", "model.channels=1", "image=16"
    data = "data=digits", "data.validation=0.9"
    ran = hires("run", *net, *data, "batch=4", "steps=3", "validate.every=3", "campaign=net")
    assert ran.code == 0, ran.err
    assert "trains with" not in ran.err
    [run] = Path("results").glob("net/*")
    words = *net, *data, "batch=100", "task=evaluate", f"weights={run}/best"
    text = "of the 1797 images that this evaluates"
    answer = hires("run", *words)
    assert answer.code == 0, answer.err
    assert "warning: the run of weights=" in answer.err
    assert text in answer.err
    assert text in hires("plan", *words).out
    answer = hires("sweep", *words, "--dry-run", "--json")
    assert text in json.loads(answer.out)["points"][0]["notes"][0]
    assert "trains with" not in hires("plan", *words, "data.split=validation").out
