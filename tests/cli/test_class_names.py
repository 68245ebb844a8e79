"""Are classes of data those of the same names in the run of the weights, or refused?"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image

from hires.cli.data_keys import with_classes
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.store import rundir
from hires.data.slide_shapes import make_slides
from hires.data.source import open_data
from hires.engine.seen_outputs import names_of_classes

KEYS = {"image": 16, "batch": 2, "steps": 3, "model": {"name": "resnet", "depth": 18}}
UNET = {"name": "unet", "levels": 1, "width": 4}


def folder(root, *classes):
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(4):
            pixels = np.full((16, 16, 3), 10 * number + i, np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return {"name": "folder", "path": str(root)}


def slides(root, first, second):
    make_slides(root, 2, 2, (64, 64), 0)
    files = sorted((root / "slides").iterdir())
    rows = [f"{file.name},{name}" for file, name in zip(files, (first, second), strict=True)]
    (root / "labels.csv").write_text("\n".join(["slide,label", *rows, ""]))
    return {"name": "slide", "path": str(root), "labels": "labels.csv", "tissue": 0.0}


def masks(root, *names):
    for part, values in (("images", 200), ("masks", np.arange(16) % len(names))):
        (root / part).mkdir(parents=True)
        pixels = np.broadcast_to(values, (16, 16)).astype(np.uint8)
        for number in range(4):
            Image.fromarray(pixels).save(root / part / f"{number}.png")
    return {"name": "masks", "path": str(root), "classes": len(names), "names": [*names]}


def config_for(task, data, weights=None, **keys):
    values = {**KEYS, "data": data, "task": {"name": task}, "weights": weights, **keys}
    if data["name"] == "masks":
        values["model"] = UNET
    return with_classes(from_dict(values))


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
    with pytest.raises(ConfigError, match=r"has wolf, .*cat, dog.*dog, wolf") as caught:
        config_for(task, make(tmp_path / "b", "dog", "wolf"), run)
    assert ("data=images" in str(caught.value)) == (task == "predict")
    # What a user names the outputs counts.
    data = {**make(tmp_path / "c", "dog", "wolf"), "order": ["wolf", "dog"]}
    assert config_for(task, data, run).data.order == ["wolf", "dog"]


@pytest.mark.parametrize(("task", "classes"), [("evaluate", ("dog",)), ("train", ("cat", "bird"))])
def test_labels_are_those_of_the_same_names(tmp_path, task, classes):
    run = trained(tmp_path, folder(tmp_path / "a", "bird", "cat", "dog"))
    config = config_for(task, folder(tmp_path / "b", *classes), f"{run}/best")
    found, names = names_by_image(config)
    assert names == ["bird", "cat", "dog"]
    assert config.model.classes == 3
    assert found == {f"{name}/{i}.png": name for name in classes for i in range(4)}
    # A run of these weights has the same classes.
    if task == "train":
        again = trained(tmp_path / "again", folder(tmp_path / "c", "dog"), weights=run)
        assert config_for("evaluate", folder(tmp_path / "d", "cat"), again).data.order == names


def test_slides_and_masks_are_mapped(tmp_path):
    run = trained(tmp_path, slides(tmp_path / "a", "tumor", "fat"))
    found, names = names_by_image(
        config_for("evaluate", slides(tmp_path / "b", "tumor", "tumor"), run)
    )
    assert (names, {*found.values()}) == (["fat", "tumor"], {"tumor"})
    run = trained(tmp_path, masks(tmp_path / "c", "ground", "leaf", "stem"))
    data = masks(tmp_path / "d", "stem", "ground")
    labels = open_data(config_for("evaluate", {**data, "ignore": 255}, run)).labels(
        0, (0, 2), (0, 4)
    )
    assert labels.tolist() == [[2, 0, 2, 0]] * 2
    with pytest.raises(ConfigError, match=r"data\.ignore=0"):
        open_data(config_for("evaluate", {**data, "ignore": 0}, run))
    data = masks(tmp_path / "e", "stem", "leaf", "ground")  # the same names in another order
    labels = open_data(config_for("evaluate", data, run)).labels(0, (0, 1), (0, 4))
    assert labels.tolist() == [[2, 1, 0, 2]]
