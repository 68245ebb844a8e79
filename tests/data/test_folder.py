"""Folders of images are listed alike by every rank, digested by content, and written whole."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError, RunError
from hires.data.content import content_of, is_unchanged
from hires.data.data_check import check_data
from hires.data.make_data import make_data
from hires.data.opening import open_source
from hires.data.sources.folder import scan
from tests.helpers.layouts import config_of
from tests.helpers.new_runs import left_by_a_killed_process


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())  # no image: the index reads names only


def test_classes_are_sub_folders_in_the_order_of_their_names(tmp_path, monkeypatch):
    images = ["C/deep/er/y.Tif", "a/w.jpeg", "a/x.tiff", "b/1.JPG", "b/2.png"]
    others = ["a/notes.txt", "a/.2.png", ".git/3.png", "README", "a/.x/4.png", "a/png"]
    touch(tmp_path / "images", *reversed(images), *others)
    monkeypatch.setenv("HOME", str(tmp_path))
    index = scan("~/images")
    assert index.class_names == ("C", "a", "b")
    assert [p.removeprefix(f"{tmp_path}/images/") for p in index.paths] == images
    assert index.labels == (0, 1, 1, 2, 2)


# Files of a folder, or a path, and what the error says.
REFUSED = [
    (None, r"needs data\.path=FOLDER, a folder with one sub-folder per class"),
    ("nowhere", r"nowhere does not exist; .*hires data make"),
    ("x" * 300, r"data\.path=.*xxx cannot be listed"),
    ("file", r"data\.path=.* is a file"),
    ([], r"data\.path=.* holds no sub-folders; put the images"),
    (["a/x.txt", "b/y.txt"], r"no images below its 2 sub-folders; .*\*\.png"),
    (["a/1.png", "b/y.txt", "c/y.txt"], r"class 'b' and 1 more has no images"),
]


def test_folder_that_is_no_data_is_refused_with_the_remedy(tmp_path):
    touch(tmp_path, "file")
    for case, (path, text) in enumerate(REFUSED):
        if isinstance(path, list):
            (tmp_path / str(case)).mkdir()
            touch(tmp_path / str(case), *path)
            path = str(case)
        with pytest.raises(ConfigError, match=text):
            scan(path if path is None else str(tmp_path / path))


def test_no_image_is_lost_where_a_folder_cannot_be_listed(tmp_path, monkeypatch):
    touch(tmp_path, "a/1.png", "a/more/2.png")
    real = os.scandir

    def failing(path):
        if Path(path).name == "more":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(ConfigError, match=r"more cannot be listed \(Permission denied\)"):
        scan(str(tmp_path))


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """A folder whose files were written long ago."""
    for name in ("cats/a.png", "cats/b.png", "dogs/c.png"):
        touch(tmp_path / "images", name)
        os.utime(tmp_path / "images" / name, (1e9, 1e9))
    return DataConfig("folder", str(tmp_path / "images"))


def test_equal_images_are_equal_data_and_others_are_others(data, tmp_path):
    file = Path(data.path, "cats/a.png")
    before = content_of(data)
    Path(data.path, "cats/notes.txt").write_text("no image")
    assert is_unchanged(data, before)
    shutil.copytree(data.path, tmp_path / "copy")  # with its times
    assert content_of(DataConfig("folder", str(tmp_path / "copy"))) == before
    file.rename(file.with_name("z.png"))
    assert not is_unchanged(data, before)
    file.with_name("z.png").rename(file)
    assert is_unchanged(data, before)
    os.utime(file)  # it may have been written anew
    assert not is_unchanged(data, before)


@pytest.mark.parametrize(
    ("kind", "keys", "file"),
    [
        ("masks", {}, "masks/00001.png"),
        ("masks", {"split_file": "parts.csv"}, "parts.csv"),
        ("images", {"labels": "names.csv"}, "names.csv"),
        ("slide", {"labels": "labels.csv"}, "labels.csv"),
        ("slide", {"labels": "annotations/*.geojson"}, "annotations/001.geojson"),
    ],
)
def test_other_labels_or_parts_are_other_data(kind, keys, file, tmp_path):
    made = {"slide": "slides", "images": "masks"}.get(kind, kind)
    make_data(made, tmp_path, 2, 2, (64, 64), 0)
    (tmp_path / "names.csv").write_text("name,label\nimages/00000.png,a\n")
    (tmp_path / "parts.csv").write_text("name,split\nimages/00000.png,train\n")
    data = DataConfig(kind, str(tmp_path), **keys)
    before = content_of(data)
    assert before.num_bytes > (tmp_path / file).stat().st_size
    os.utime(tmp_path / file, (1e9, 1e9))
    assert not is_unchanged(data, before)


def test_classes_of_images_stand_in_a_table(tmp_path, pixels):
    for number, name in enumerate(("a/1.png", "a/2.png", "b/3.jpg", "4.png", "5.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels(8, 8, 3, seed=number)).save(tmp_path / name)

    def opened(lines, **keys):
        (tmp_path / "labels.csv").write_text(f"name,label\n{lines}")
        data = DataConfig("images", str(tmp_path), labels="labels.csv", fit="error", **keys)
        return open_source(data, (8, 8), 3, 0)

    source = opened("3,cat\na/1.png,dog\n5.png,cat\n4,ant\n")  # which leaves one out
    assert source.class_names == ("ant", "cat", "dog")
    held = [(source.name(i), source.class_names[source.label(i)]) for i in range(len(source))]
    assert held == [("4.png", "ant"), ("5.png", "cat"), ("a/1.png", "dog"), ("b/3.jpg", "cat")]
    ordered = opened("3,cat\n4,dog\n", order=["dog", "cat"])
    assert [ordered.label(i) for i in range(2)] == [0, 1]
    for lines, words in (
        ("3,cat\nb/4.png,dog\n7,cat\n", r"labels\.csv names no image below .* with 7, b/4\.png"),
        ("a/1.png,cat\n1,dog\n", r"'a/1.png' and '1' both name a/1\.png"),
        ("1,\n", r"line 2 lacks its name or label"),
    ):
        with pytest.raises(ConfigError, match=words):
            opened(lines)
    config = config_of(data={"name": "images", "path": str(tmp_path), "labels": "labels.csv"})
    finding = check_data(str(tmp_path), config, "images").findings[0]
    assert (finding.severity, "line 2 lacks" in finding.text) == ("error", True)


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def make(path: Path, **how):
    return make_data(
        "textures", path, **{"classes": 3, "count": 7, "size": (20, 36), "seed": 5} | how
    )


def test_made_folder_has_the_images_of_the_synthetic_source_in_8_bits(tmp_path):
    spans, size, path = ((0, 300), (0, 41)), (300, 41), tmp_path / "new" / "data"
    assert make(path, size=size) == 7
    folder = open_source(DataConfig(name="folder", path=str(path)), size, 3, seed=0)
    memory = open_source(DataConfig(classes=3), size, 3, seed=5)
    assert folder.class_names == ("texture0", "texture1", "texture2")
    assert [folder.label(i) for i in range(len(folder))] == [0, 0, 0, 1, 1, 2, 2]
    for place, number in enumerate((0, 3, 6, 1, 4, 2, 5)):  # class by class
        made, drawn = folder.window(place, *spans), memory.window(number, *spans)
        np.testing.assert_allclose(made, drawn, atol=0.5 * 4 / 255 + 1e-6)


def test_full_disk_leaves_nothing_and_the_same_arguments_give_the_same_bytes(tmp_path, monkeypatch):
    real, calls = tifffile.imwrite, []

    def failing(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"II*\0 half of an image")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(tifffile, "imwrite", failing)
    with pytest.raises(RunError, match=r"cannot write images to .*: No space left on device"):
        make(tmp_path / "a")
    assert contents(tmp_path) == {}
    (tmp_path / "a").mkdir()  # an empty folder is as good as none
    (tmp_path / "link").symlink_to(tmp_path / "a")
    ended = left_by_a_killed_process(tmp_path / "c")
    touch(ended, "texture0/stale.tif")
    assert (make(tmp_path / "link"), make(tmp_path / "b"), make(tmp_path / "b")) == (7, 7, 0)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not ended.exists()


def test_other_files_are_not_mixed_with(tmp_path):
    make(tmp_path / "made")
    touch(tmp_path, "file", "notes/x")
    before = contents(tmp_path)
    for name, error, text in (
        ("made", ConfigError, "made with count=7, not 9 and seed=5, not 1; choose"),
        ("notes", ConfigError, "holds files that hires did not write; choose"),
        ("file/data", RunError, r"cannot write images to .*File exists"),
    ):
        with pytest.raises(error, match=text):
            make(tmp_path / name, count=9, seed=1)
    assert contents(tmp_path) == before
