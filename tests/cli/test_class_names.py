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


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.broadcast_to(np.uint8(pixels), (16, 16))).save(path)


def folder(root, *classes):
    for number, name in enumerate(classes):
        for i in range(4):
            save(root / name / f"{i}.png", 10 * number + i)
    return {"name": "folder", "path": str(root)}


def slides(root, first, second):
    make_slides(root, 2, 2, (64, 64), 0)
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
        labels = open_data(config_for("evaluate", data, run)).labels(0, (0, 1), (0, 4))
        assert labels.tolist() == [row]
    data = {**masks(tmp_path / "e", "stem", "ground"), "ignore": 0}
    with pytest.raises(ConfigError, match=r"data\.ignore=0"):
        open_data(config_for("evaluate", data, run))
