"""Are the parts of a map, written by many at once, one file under a name that is safe?"""

from __future__ import annotations

import errno
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile
import zarr

from hires.core.errors import RunError
from hires.engine import prediction_maps
from hires.engine.prediction_maps import MapKind, MapPlace, PredictionMaps, safe_names

FORMATS = {"ome-tiff": ".ome.tif", "zarr": ".zarr"}


GREY = MapKind(1, np.uint8, "YX")


def all_of(rows, columns):
    """The place of a map that is as large as the output."""
    return MapPlace(np.arange(rows), np.arange(columns))


def read(path):
    if path.suffix == ".tif":
        return tifffile.imread(path)
    return zarr.open_array(path, mode="r")[:]


@pytest.mark.parametrize("form", FORMATS)
def test_many_writers_make_one_file_of_all_parts(tmp_path, monkeypatch, form):
    monkeypatch.setattr(prediction_maps, "CHUNK", 24)  # tiles of 8 rows share chunks
    whole = np.random.default_rng(0).integers(0, 250, (6, 64, 40), np.uint8)
    every = [PredictionMaps(tmp_path, "abcdef", GREY, form) for _ in range(8)]
    for sample in range(6):
        every[0].make(sample, all_of(64, 40))

    def write(k):
        rows = 8 * k, 8 * k + 8
        for sample in range(6):
            part = whole[sample, slice(*rows)]
            every[k].write(sample, all_of(64, 40), part, (*rows, 0, 40))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{c}{FORMATS[form]}" for c in "abcdef"]
    for sample, name in enumerate("abcdef"):
        made = read(tmp_path / f"{name}{FORMATS[form]}")
        assert (made == whole[sample]).all()


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    maps = PredictionMaps(tmp_path, ["one"], GREY)
    with pytest.raises(RunError, match=r"one\.ome\.tif: No space left on device; free some space"):
        maps.make(0, all_of(4, 4))
    assert list(tmp_path.iterdir()) == []


def test_names_stay_in_the_folder_and_differ():
    ids = ["7", "cat/1.png", "cat_1.png", "CAT_1.PNG", "../../etc/x", "/abs", "..", "", "=a b", "ü"]
    names = safe_names([*ids, "n" * 300, "n" * 301], ".tif")
    assert names[:3] == ["7.tif", "cat_1.png.tif", "cat_1.png-2.tif"]
    assert names[4:6] == ["_.._etc_x.tif", "_abs.tif"]
    assert names[9] == "ü.tif"
    assert len({name.casefold() for name in names}) == len(names)
    assert all("/" not in name and not name.startswith(".") for name in names)
    assert max(len(name.encode()) for name in names) < 255
    names = safe_names(["slides/000.tif", "a.TIFF", "b.ome.tif", "a.tif", ".tif"], ".zarr")
    assert names == [f"{name}.zarr" for name in ("slides_000", "a", "b", "a-3", "tif")]
    assert len({*safe_names(["a/b", "a_b-2", "a b", "a_b"], ".tif")}) == 4


def test_a_rank_holds_its_part_and_never_the_map(tmp_path):
    kind = MapKind(3, np.float32, "CYX", "abc")  # 48 MiB
    part = np.ones((3, 16, 2048), np.float32)
    maps = PredictionMaps(tmp_path, ["x"], kind)
    maps.make(0, all_of(2048, 2048))
    tracemalloc.start()
    try:
        maps.write(0, all_of(2048, 2048), part, (100, 116, 0, 2048))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * 2**20
    whole = read(tmp_path / "x.ome.tif")
    assert (whole[:, 100:116] == 1).all()
    assert whole.sum() == part.sum()


CLASSES = ["a<b", "{é}", "c\x01\udcff"]
KINDS = {
    "YX": (MapKind(1, np.uint8, "YX", CLASSES), "uint8"),
    "CYX": (MapKind(3, np.float32, "CYX", CLASSES), "float"),
    "YXS": (MapKind(3, np.float32, "YXS"), "float"),
}


@pytest.mark.parametrize("axes", KINDS)
def test_ome_readers_find_axes_type_and_classes(tmp_path, monkeypatch, axes):
    monkeypatch.setattr(prediction_maps, "BIG_BYTES", 2000)  # more than numbers of a map
    kind, dtype = KINDS[axes]
    whole = np.random.default_rng(0).random(kind.shape((20, 31))).astype(kind.dtype)
    texts = set()
    for folder in (tmp_path / "r" / "a0" / "p", tmp_path / "r" / "a1" / "p"):
        maps = PredictionMaps(folder, ["x"], kind, "ome-tiff")
        maps.make(0, all_of(20, 31))
        maps.write(0, all_of(20, 31), whole, (0, 20, 0, 31))
        with tifffile.TiffFile(folder / "x.ome.tif") as file:
            assert (file.is_ome, file.is_bigtiff) == (True, axes != "YX")
            assert (file.series[0].kind, file.series[0].axes) == ("ome", axes)
            assert (file.asarray() == whole).all()
            texts.add(file.ome_metadata)
    [text] = texts  # of every attempt
    tree = ElementTree.fromstring(text)
    at = {"o": "http://www.openmicroscopy.org/Schemas/OME/2016-06"}
    pixels = tree.find(".//o:Pixels", at)
    assert (pixels.get("Type"), pixels.get("SizeX"), pixels.get("SizeY")) == (dtype, "31", "20")
    named = [one.get("Name") for one in tree.findall(".//o:Channel", at)]
    listed = [one.text for one in tree.findall(".//o:M", at)]
    if axes == "CYX":
        assert named == ["a<b", "{é}", "c__"]
    elif axes == "YX":
        assert listed == ["a<b", "{é}", "c__"]
