"""Is a data set divided alike by every run, and without leaks?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data.source import open_source


def opened(**keys):
    return open_source(DataConfig(**keys), (8, 8), 3, seed=keys.pop("seed", 0))


def names(source):
    return [source.name(i) for i in range(len(source))]


MADE = {"name": "synthetic", "classes": 3, "length": 60, "validation": 0.2}


def test_parts_are_disjoint_whole_and_stratified():
    whole, train, held = (opened(**MADE, split=s) for s in ("all", "train", "validation"))
    assert sorted([*names(train), *names(held)], key=int) == names(whole)
    assert Counter(map(held.label, range(len(held)))) == {0: 4, 1: 4, 2: 4}
    first = whole.window(int(held.name(0)), (0, 8), (0, 8))
    assert np.array_equal(held.window(0, (0, 8), (0, 8)), first)


def test_choice_follows_the_split_seed_alone():
    held = opened(**MADE, split="validation")
    config = DataConfig(**MADE, split="validation")
    assert names(open_source(config, (8, 8), 3, seed=5)) == names(held)
    assert names(opened(**MADE, split="validation", split_seed=1)) != names(held)


def test_small_classes_have_images_in_both_parts():
    few = {**MADE, "length": 6, "validation": 0.01}
    assert len(opened(**few, split="validation")) == 3
    assert len(opened(**{**few, "validation": 0.99}, split="train")) == 3
    with pytest.raises(ConfigError, match=r"data\.split=validation: no class has two images"):
        opened(**{**few, "length": 3}, split="validation")


def folder(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(root / path, np.zeros((8, 8, 3), np.uint8))
    return root


def test_parts_of_the_folder_itself_are_taken(tmp_path):
    folder(tmp_path, "train/cat/1.tif", "train/dog/2.tif", "val/cat/3.tif", "val/dog/4.tif")
    of = {"name": "folder", "path": str(tmp_path)}
    train, held = opened(**of, split="train"), opened(**of, split="validation")
    assert [names(train), names(held)] == [["cat/1.tif", "dog/2.tif"], ["cat/3.tif", "dog/4.tif"]]
    assert train.class_names == held.class_names == ("cat", "dog")


def test_class_of_one_part_only_would_shift_labels_and_is_refused(tmp_path):
    folder(tmp_path, "train/cat/1.tif", "train/dog/2.tif", "valid/dog/4.tif")
    with pytest.raises(ConfigError, match="only train has the class 'cat'"):
        opened(name="folder", path=str(tmp_path), split="validation")


@pytest.mark.parametrize("value", [0, 1, 1.5, float("nan")])
def test_share_without_images_is_refused(value):
    with pytest.raises(ConfigError, match=r"data\.validation=.* must be a share above 0"):
        DataConfig(validation=value)


def test_third_part_is_for_a_last_test(tmp_path):
    parts = {s: names(opened(**MADE, split=s, test=0.1)) for s in ("train", "validation", "test")}
    assert parts["validation"] == names(opened(**MADE, split="validation"))  # as without a test
    assert [len(part) for part in parts.values()] == [42, 12, 6]
    assert len({*parts["train"], *parts["validation"], *parts["test"]}) == 60
    with pytest.raises(ConfigError, match=r"data\.split=test: no images are set apart"):
        opened(**MADE, split="test")
    folder(tmp_path, "train/cat/1.tif", "val/cat/3.tif")
    of = {"name": "folder", "path": str(tmp_path), "split": "test"}
    with pytest.raises(ConfigError, match=r"has train and val, but no folder test"):
        opened(**of)
    folder(tmp_path, "test/cat/5.tif", "test/cat/6.tif")
    assert names(opened(**of)) == ["cat/5.tif", "cat/6.tif"]
    folder(tmp_path, "test/dog/5.tif")
    with pytest.raises(ConfigError, match=r"only test has the class 'dog'"):
        opened(**of)


def test_file_lists_the_images_of_each_part(tmp_path):
    folder(tmp_path, "cat/1.tif", "cat/2.tif", "dog/3.tif", "dog/4.tif", "dog/5.tif")
    listed = tmp_path / "parts.csv"
    listed.write_text("name,split\ncat/2.tif,train\ndog/5.tif,train\ndog/3.tif,validation\n")
    of = {"name": "folder", "path": str(tmp_path), "split_file": "parts.csv"}
    assert names(opened(**of, split="train")) == ["cat/2.tif", "dog/5.tif"]
    held = opened(**of, split="validation")
    assert names(held) == ["dog/3.tif"]
    assert held.class_names == ("cat", "dog")
    assert len(opened(**of)) == 5
    with pytest.raises(ConfigError, match=r"lists no image for data\.split=test"):
        opened(**of, split="test")
    for text, wrong in (
        ("name,split\ncat/9.tif,train\n", r"'cat/9\.tif' is none of the data's images"),
        ("name,split\ncat/2.tif,held\n", "'held' is no part; use train, validation, test"),
        ("image,split\n", "its first line must name name,split"),
    ):
        listed.write_text(text)
        with pytest.raises(ConfigError, match=wrong):
            opened(**of, split="train")
