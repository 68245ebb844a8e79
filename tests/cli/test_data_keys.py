"""What follows from data: classes and their names, steps and saved weights; and an evaluation says
which of its images its weights or scales were made with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hires.cli.data_keys import resolve_data, training_overlap
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.core.store import rundir
from hires.core.store.naming import run_name
from hires.data.make_data import make_data
from hires.data.opening import open_data
from hires.engine.owned_outputs import names_of_classes


def resolved(**keys: Any) -> RunConfig:
    """Returns a config of 10 images with what follows from them."""
    return resolve_data(from_dict({"image": 8, "batch": 4, "data": {"length": 10}, **keys}))


def test_every_image_is_taken_as_often_as_there_are_epochs():
    for epochs, batch, length, steps in (
        (2, 4, 10, 5),
        (0.5, 4, 10, 2),
        (1.1, 1, 10, 11),
        (0.07, 1, 100, 7),  # though the product of the two numbers is a little more
    ):
        keys = {"data": {"length": length}, "measure": {"warmup": 0}}
        config = resolved(epochs=epochs, batch=batch, **keys)
        assert (config.steps, config.epochs) == (steps, None)


def test_run_of_epochs_is_the_run_of_as_many_steps_and_saves_its_weights():
    long = resolved(epochs=40.0)
    assert (long.measure.warmup, resolved(epochs=0.1).measure.warmup) == (2, 0)
    assert run_name(long) == run_name(resolved(steps=100))
    assert long.checkpoint.saves_end
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
TEXTURES = {"name": "textures", "length": 40}


def run_of(folder, data, **keys):
    """Returns the folder of a training that has not begun, and what it reads."""
    config = from_dict({"image": 16, "batch": 4, "steps": 3, "model": NET, "data": data, **keys})
    config = resolve_data(dataclasses.replace(config, results=str(folder)))
    return str(rundir.create(config, {}, ["hires", "run"]).path)


def findings_of(weights, data, task="evaluate", **keys):
    values = {"image": 16, "batch": 4, "model": NET, "data": data, "task": {"name": task}, **keys}
    found = training_overlap(resolve_data(from_dict({**values, "weights": weights})))
    return [(one.severity, one.key, one.text) for one in found]


def test_evaluation_of_images_of_the_training_is_a_warning(tmp_path):
    # All 1797 digits were evaluated without a word, 1618 of which the training learns from.
    run = run_of(tmp_path, DIGITS, validate={"every": 3})
    [(severity, key, text)] = findings_of(f"{run}/best", DIGITS)
    assert (severity, key) == ("warning", "data.split")
    assert "trains with images that this evaluates (data.split=train of its run)" in text
    assert findings_of(run, DIGITS, "predict")[0][0] == "note"
    assert findings_of(run, {**DIGITS, "split": "train"})[0][0] == "note"
    # Other images are no finding.
    assert findings_of(run, {**DIGITS, "split": "validation"}) == []
    assert findings_of(run, TEXTURES) == []
    assert findings_of(run, DIGITS, "infer") == []
    (tmp_path / "net.safetensors").touch()
    [(severity, key, _)] = findings_of(str(tmp_path / "net.safetensors"), DIGITS)
    assert (severity, key) == ("note", "data.order")  # it has no names of classes
    other = run_of(tmp_path, TEXTURES)
    assert findings_of(other, TEXTURES, seed=1) == []
    assert findings_of(other, {**TEXTURES, "length": 41}) == []
    assert "trains with images" in findings_of(other, TEXTURES)[0][2]


def test_data_that_is_divided_in_another_way_shares_some_images(tmp_path):
    run = run_of(tmp_path, DIGITS, validate={"every": 3})
    every = run_of(tmp_path / "all", DIGITS)
    for weights, more in ((run, {"split_seed": 1}), (every, {})):
        [(severity, _, _)] = findings_of(weights, {**DIGITS, "split": "validation", **more})
        assert severity == "warning"


def test_means_are_those_of_the_images_themselves_and_not_of_others_seen_before(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HIRES_CACHE", "on")
    textures = {"data": {"name": "textures", "length": 8, "normalize": "dataset"}}
    changes = [textures, {**textures, "seed": 1}, {**textures, "image": 16}]
    changes.append({"data": {**textures["data"], "length": 9}})
    changes.append({"data": folder(tmp_path / "a", "cat", "dog") | {"normalize": "dataset"}})

    def means():
        return [tuple(resolved(**change).data.mean) for change in changes]

    first = means()
    assert len({*first}) == len(changes)
    save(tmp_path / "a" / "cat" / "0.png", 250)
    *same, edited = means()
    assert (same, edited != first[-1]) == (first[:-1], True)


def test_missing_weights_are_the_first_cause_that_is_named():
    for task, data in (("predict", {"name": "images"}), ("evaluate", {"name": "masks"})):
        data["path"] = "nowhere"
        with pytest.raises(ConfigError, match="weights=nothere does not exist; give a run folder"):
            resolved(task={"name": task}, data=data, weights="nothere")


KEYS = {"image": 16, "batch": 2, "steps": 3, "model": {"name": "resnet", "depth": 18}}
UNET = {"name": "unet", "levels": 1, "width": 4}


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.broadcast_to(np.uint8(pixels), (16, 16))).save(path)


def folder(root, *classes):
    for number, name in enumerate(classes):
        for i in range(4):
            save(root / name / f"{i}.png", 10 * number + i)
    return {"name": "folder", "path": str(root)}


def slides(root, first, second):
    make_data("slides", root, 2, 2, (64, 64), 0)
    files = sorted((root / "slides").iterdir())
    rows = [f"{file.name},{name}" for file, name in zip(files, (first, second), strict=True)]
    (root / "labels.csv").write_text("\n".join(["slide,label", *rows, ""]))
    return {"name": "slide", "path": str(root), "labels": "labels.csv", "tissue": 0.0}


def masks(root, *names):
    for number in range(4):
        save(root / "images" / f"{number}.png", 200)
        save(root / "masks" / f"{number}.png", np.arange(16) % len(names))
    return {"name": "masks", "path": str(root), "classes": len(names), "names": [*names]}


def config_for(task, data, weights=None, **keys):
    values = {**KEYS, "data": data, "task": {"name": task}, "weights": weights, **keys}
    if data["name"] == "masks":
        values["model"] = UNET
    return resolve_data(from_dict(values))


def trained(results, data, **keys):
    """Returns the folder of a training that has not begun."""
    config = dataclasses.replace(config_for("train", data, **keys), results=str(results))
    return str(rundir.create(config, {}, ["hires", "run"]).path)


def names_by_image(config):
    """Returns what the class of each image is called in the order of the outputs."""
    source = open_data(config)
    names = names_of_classes(source, [2, config.model.classes])
    return {source.name(i): names[source.label(i)] for i in range(len(source))}, names


@pytest.mark.parametrize(
    ("make", "task"), [(folder, "train"), (slides, "evaluate"), (masks, "predict")]
)
def test_class_without_that_name_is_refused_with_both_lists(tmp_path, task, make):
    # Trained on cats and dogs, every wolf counted as a dog and every dog as a cat, without a word.
    run = trained(tmp_path, make(tmp_path / "a", "cat", "dog"))
    data = make(tmp_path / "b", "dog", "wolf")
    with pytest.raises(ConfigError, match=r"has wolf, .*cat, dog.*dog, wolf"):
        config_for(task, data, run)
    # What a user names the outputs counts.
    config = config_for(task, {**data, "order": ["wolf", "dog"]}, run)
    assert config.data.order == ["wolf", "dog"]


def test_labels_are_those_of_the_same_names(tmp_path):
    run = trained(tmp_path, folder(tmp_path / "a", "bird", "cat", "dog"))
    for task, classes in (("evaluate", ("dog",)), ("train", ("cat", "bird"))):
        config = config_for(task, folder(tmp_path / task, *classes), f"{run}/best")
        found, names = names_by_image(config)
        assert (names, config.model.classes) == (["bird", "cat", "dog"], 3)
        assert found == {f"{name}/{i}.png": name for name in classes for i in range(4)}
    # A run of these weights has the same classes.
    again = trained(tmp_path / "again", folder(tmp_path / "c", "dog"), weights=run)
    assert config_for("evaluate", folder(tmp_path / "d", "cat"), again).data.order == names


def test_slides_and_masks_are_mapped(tmp_path):
    run = trained(tmp_path, slides(tmp_path / "a", "tumor", "fat"))
    data = slides(tmp_path / "b", "tumor", "tumor")
    found, names = names_by_image(config_for("evaluate", data, run))
    assert (names, {*found.values()}) == (["fat", "tumor"], {"tumor"})
    run = trained(tmp_path, masks(tmp_path / "c", "ground", "leaf", "stem"))
    for number, (classes, more, row) in enumerate((
        (("stem", "ground"), {"ignore": 255}, [2, 0, 2, 0]),
        (("stem", "leaf", "ground"), {}, [2, 1, 0, 2]),  # the same names in another order
    )):  # fmt: skip
        data = {**masks(tmp_path / str(number), *classes), **more}
        labels = open_data(config_for("evaluate", data, run)).target(0, (0, 1), (0, 4))
        assert labels.tolist() == [row]
    data = {**masks(tmp_path / "e", "stem", "ground"), "ignore": 0}
    with pytest.raises(ConfigError, match=r"data\.ignore=0"):
        open_data(config_for("evaluate", data, run))
