"""Are the parts of a map, written by many at once, one file under a name that is safe?"""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tifffile

from hires.core.errors import RunError
from hires.engine import prediction_maps
from hires.engine.prediction_maps import PredictionMaps, safe_names

GREY = {"photometric": "minisblack"}


def test_many_writers_make_one_file_of_all_parts(tmp_path):
    whole = np.random.default_rng(0).integers(0, 250, (6, 64, 40), np.uint8)
    every = [PredictionMaps(tmp_path, "abcdef", (64, 40), np.uint8, **GREY) for _ in range(8)]

    def write(k):
        rows = slice(8 * k, 8 * k + 8)
        for sample in range(6):
            every[k].write(sample, whole[sample, rows], (rows, slice(0, 40)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{c}.tif" for c in "abcdef"]
    for sample, name in enumerate("abcdef"):
        assert (tifffile.imread(tmp_path / f"{name}.tif") == whole[sample]).all()


def test_large_files_are_big_tiffs(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction_maps, "BIG_BYTES", 2000)
    for size, is_big in ((40, False), (60, True)):
        maps = PredictionMaps(tmp_path, [f"{size}"], (size, size), np.uint8, **GREY)
        maps.write(0, np.full((2, size), 7, np.uint8), (slice(1, 3), slice(None)))
        with tifffile.TiffFile(tmp_path / f"{size}.tif") as file:
            assert file.is_bigtiff == is_big
            assert file.asarray()[:4, 0].tolist() == [0, 7, 7, 0]


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prediction_maps.os, "posix_fallocate", full)
    maps = PredictionMaps(tmp_path, ["one"], (4, 4), np.uint8, **GREY)
    with pytest.raises(RunError, match=r"one\.tif: No space left on device; free some space"):
        maps.write(0, np.zeros((4, 4), np.uint8), (slice(None), slice(None)))
    assert list(tmp_path.iterdir()) == []


def test_file_of_an_earlier_attempt_is_taken_and_stays_there(tmp_path, monkeypatch):
    for links in (True, False):
        old, new = tmp_path / f"old{links}", tmp_path / f"new{links}"
        PredictionMaps(old, ["x"], (2, 2), np.uint8, **GREY).write(
            0, np.eye(2, dtype=np.uint8), (slice(None), slice(None))
        )
        if not links:

            def refuse(*args):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))

            monkeypatch.setattr(prediction_maps.os, "link", refuse)
        maps = PredictionMaps(new, ["x"], (2, 2), np.uint8, **GREY)
        maps.adopt(0, old)
        maps.adopt(0, old)  # it is there already
        assert (new / "x.tif").read_bytes() == (old / "x.tif").read_bytes()
    with pytest.raises(RunError, match=r"cannot write .*y\.tif"):
        PredictionMaps(new, ["y"], (2, 2), np.uint8, **GREY).adopt(0, old)


def test_names_stay_in_the_folder_and_differ():
    ids = ["7", "cat/1.png", "cat_1.png", "CAT_1.PNG", "../../etc/x", "/abs", "..", "", "=a b", "ü"]
    names = safe_names([*ids, "n" * 300, "n" * 301])
    assert names[:3] == ["7.tif", "cat_1.png.tif", "cat_1.png-2.tif"]
    assert names[4:6] == ["_.._etc_x.tif", "_abs.tif"]
    assert names[9] == "ü.tif"
    assert len({name.casefold() for name in names}) == len(names)
    assert all("/" not in name and not name.startswith(".") for name in names)
    assert max(len(name.encode()) for name in names) < 255


def test_a_name_like_that_of_a_later_twin_is_taken_once():
    names = safe_names(["a/b", "a_b-2", "a b", "a_b"])
    assert len(set(names)) == 4


def test_ranks_make_one_file_where_the_file_system_has_no_links(tmp_path, monkeypatch):
    def refused(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(prediction_maps.os, "link", refused)
    test_many_writers_make_one_file_of_all_parts(tmp_path)


def test_a_file_is_written_through_a_name_that_network_file_systems_can_lock(tmp_path, monkeypatch):
    # NFS locks for writing only what is open for writing; the file was open for reading.
    modes, lock = [], prediction_maps.fcntl.flock

    def noted(file, how):
        modes.append((file.mode, how))
        lock(file, how)

    monkeypatch.setattr(prediction_maps.fcntl, "flock", noted)
    maps = PredictionMaps(tmp_path, ["x"], (2, 2), np.uint8, **GREY)
    maps.write(0, np.ones((2, 2), np.uint8), (slice(None), slice(None)))
    assert modes == [("rb+", prediction_maps.fcntl.LOCK_EX)]
