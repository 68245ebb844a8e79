"""Are slides cut into the right patches, with the right classes, in the right pixels?"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter

import numpy as np
import pytest
import tifffile

from hires.cli.data_keys import resolve_data
from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data.image_format import ImageError
from hires.data.make_data import make_data
from hires.data.opening import open_source
from hires.data.slide_file import OpenSlideLevel, levels_of, slide_level
from hires.data.tissue import otsu, tissue_of
from tests.helpers.layouts import config_of

SIZE = (384, 512)
MOST = 2**28


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "slides"
    assert make_data("slides", folder, 2, 4, SIZE, 0) == 4
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


def source_of(folder, size=(32, 32), **keys):
    return open_source(DataConfig(name="slide", path=str(folder), **keys), size, 3, 0)


def slide(folder, number, level=0):
    path = folder / "slides" / f"{number:03d}.tif"
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        return (page if level == 0 else page.pages[level - 1]).asarray()


def labels_in(source):
    return Counter(source.class_names[source.label(i)] for i in range(len(source)))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_patches_are_parts_of_the_slide_at_its_level(folder, level):
    source = source_of(folder, tissue=0, level=level)
    height, width = SIZE[0] >> level, SIZE[1] >> level
    assert len(source) == 4 * (height // 32) * (width // 32)
    number = len(source) - 1
    name, _, place = source.name(number).partition("[")
    assert name == "slides/003.tif"
    row, col = map(int, place.rstrip("]").split(","))
    assert (row, col) == (height // 32 * 32 - 32, width // 32 * 32 - 32)
    pixels = slide(folder, 3, level)[row : row + 32, col : col + 32]
    window = source.window(number, (3, 20), (7, 32))
    expected = pixels[3:20, 7:].transpose(2, 0, 1).astype(np.float32) / np.float32(255 / 4) - 2
    assert np.allclose(window, expected, atol=1e-6)
    source = source_of(folder, tissue=0, region=[10, 20, 70, 64], stride=16)
    places = [source.name(i).partition("[")[2] for i in range(len(source) // 4)]
    assert places == [f"{r},{c}]" for r in (10, 26, 42) for c in (20, 36, 52)]


def test_threshold_is_that_of_otsu():
    levels = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8)

    def between(t):  # the definition: the variance between the classes
        low, high = levels[levels <= t], levels[levels > t]
        return len(low) * len(high) * (float(low.mean()) - float(high.mean())) ** 2

    assert otsu(levels) == max(range(levels.min(), levels.max()), key=between)
    assert not tissue_of(np.full((4, 4, 3), 0.9, np.float32)).any()


def test_slides_have_classes_of_a_table_and_patches_of_their_outlines(folder):
    source = source_of(folder, labels="labels.csv")
    assert source.class_names == ("class0", "class1")
    for i in range(len(source)):
        assert source.label(i) == int(source.name(i)[9]) % 2
    (folder / "labels.csv").write_text("slide,label\n000,a\n001.tif,b\nslides/002.tif,a\n003,b\n")
    assert source_of(folder, labels="labels.csv").class_names == ("a", "b")
    inside = labels_in(source_of(folder, labels="annotations/*.geojson", tissue=0))
    every = labels_in(source_of(folder, labels="annotations/*.geojson", tissue=0, outside="glass"))
    assert every == {**inside, "glass": every["glass"]}
    assert sum(every.values()) == len(source_of(folder, tissue=0))


def test_slides_are_divided_not_their_patches(folder):
    def slides_of(**keys):
        source = source_of(folder, labels="labels.csv", **keys)
        return {source.name(i).partition("[")[0] for i in range(len(source))}, labels_in(source)

    parts = [slides_of(split=split, validation=0.4) for split in ("train", "validation")]
    (train, classes), (held, held_classes) = parts
    assert len(train) == len(held) == len(classes) == len(held_classes) == 2
    assert not train & held
    (folder / "parts.csv").write_text("name,split\nslides/000.tif,test\nslides/001.tif,train\n")
    assert slides_of(split="test", split_file="parts.csv")[0] == {"slides/000.tif"}


def test_whole_slides_are_fitted_to_the_image(folder):
    source = source_of(folder, cut="whole", size=(64, 96), region=[100, 200, 64, 96])
    assert (len(source), source.name(1)) == (4, "slides/001.tif")
    pixels = slide(folder, 1)[100:164, 200:296].transpose(2, 0, 1) / (255 / 4) - 2
    assert np.allclose(source.window(1, (0, 64), (0, 96)), pixels, atol=1e-6)
    source = source_of(folder, cut="whole", size=(64, 96), region=[100, 200, 32, 96], fit="crop")
    assert not source.window(1, (0, 16), (0, 96)).any()  # grey


def test_slide_that_was_written_anew_is_read_anew(tmp_path):
    # Of one name, size and shape: open levels, maps of tissue and pixels are those of the new one.
    for place, white in enumerate((0, 1)):
        pixels = np.full((256, 256, 3), (190, 110, 160), np.uint8)
        pixels[:128] = 240
        (tmp_path / "s.tif").unlink(missing_ok=True)  # else an open file has the new pixels, too
        with tifffile.TiffWriter(tmp_path / "s.tif") as file:
            file.write(pixels[:: -1 if white else 1], photometric="rgb", tile=(64, 64))
        os.utime(tmp_path / "s.tif", (1e9 + place, 1e9 + place))
        source = source_of(tmp_path, tissue=0.5)
        rows = {int(source.name(i).partition("[")[2].partition(",")[0]) for i in range(32)}
        assert rows == ({0, 32, 64, 96} if white else {128, 160, 192, 224})
        assert (len(source), len(source_of(tmp_path, (64, 64), tissue=0.5))) == (32, 8)
        assert len({*source.window(0, (0, 32), (0, 32))[0].flatten().tolist()}) == 1
        assert source.window(0, (0, 1), (0, 1))[0, 0, 0] == pytest.approx(190 / 63.75 - 2)


def test_levels_leave_out_labels_and_other_shapes_and_few_stay_open(folder, tmp_path):
    path = tmp_path / "flat.tif"
    options = {"tile": (64, 64), "photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(np.zeros((256, 512, 3), np.uint8), **options)
        file.write(np.zeros((64, 128, 3), np.uint8), photometric="rgb", metadata=None)  # thumbnail
        file.write(np.ones((128, 256, 3), np.uint8), subfiletype=1, **options)
        file.write(np.zeros((128, 128, 3), np.uint8), **options)  # label
        file.write(np.ones((63, 127, 3), np.uint8), subfiletype=1, **options)
    assert levels_of(path, MOST) == [(256, 512), (128, 256), (63, 127)]
    assert slide_level(path, 1, MOST).read((0, 4), (0, 4)).all()
    first = slide_level(path, 0, MOST)
    assert slide_level(path, 0, MOST) is first
    for number in range(4):
        slide_level(folder / "slides" / f"{number:03d}.tif", 0, MOST)
    assert slide_level(path, 0, MOST) is not first


WRONG = {
    "has 3 levels, and data.level=7": {"level": 7},
    r"leaves the 384 x 512 pixels of level 0": {"region": [0, 0, 400, 100]},
    r"leaves the 384 x 512 pixels": {"region": [0, 450, 100, 100]},
    "it has 384 x 512 pixels where image asks for 32 x 32": {"cut": "whole", "fit": "error"},
    "hold no patch of 32 x 32; use a smaller image": {"region": [0, 0, 20, 100]},
    "one to learn from; lower data.tissue": {"region": [0, 0, 32, 32], "tissue": 0.9},
    "cannot be read: No such file or directory; give a CSV file": {"labels": "none.csv"},
    "no such files below data.path": {"labels": "none/*.geojson"},
    r"no folder|set apart": {"labels": "labels.csv", "split": "test"},
    r"data\.names has 1 names, and the data 2 classes": {"labels": "labels.csv", "names": ["a"]},
    r"data\.names has 3 names, and the data 2": {"labels": "labels.csv", "names": ["a", "b", "c"]},
}
TABLES = {
    "name,label\n": "has the columns name, label; its first line must name slide,label",
    "slide,label\n000,a\n": "has no line for the slide slides/001.tif",
    "slide,label\n000,a\n000,b\n": "000 is a and, later, b",
    "slide,label\n000,\n": "line 2 lacks its slide or label",
}


def test_wrong_keys_and_files_are_answered_with_the_remedy(folder, monkeypatch):
    for text, keys in WRONG.items():
        with pytest.raises(ConfigError, match=text):
            len(source_of(folder, **keys))
    for held, text in TABLES.items():
        (folder / "labels.csv").write_text(held)
        with pytest.raises(ConfigError, match=text):
            source_of(folder, labels="labels.csv")
    with pytest.raises(ConfigError, match=r"data=slide has no classes.*data\.labels"):
        resolve_data(config_of(data={"name": "slide", "path": str(folder)}, image=[32, 32]))
    (folder / "annotations" / "000.geojson").unlink()
    with pytest.raises(ConfigError, match=r"000\.tif has no annotations .*data\.outside=CLASS"):
        source_of(folder, labels="annotations/*.geojson")
    (folder / "slides" / "000.tif").write_bytes(b"II*\0" + bytes(8))
    with pytest.raises(ConfigError, match=r"cannot read the image .*000\.tif"):
        len(source_of(folder))
    shutil.rmtree(folder / "slides")
    with pytest.raises(ConfigError, match="holds no slides; they are files named"):
        source_of(folder)
    monkeypatch.setitem(sys.modules, "openslide", None)
    with pytest.raises(ImageError, match=r"pip install -e '\.\[slides\]'"):
        OpenSlideLevel(folder / "a.svs", 0)
