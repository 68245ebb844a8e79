import errno
import json
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError, RunError
from hires.data import textures
from hires.data.folder import MANIFEST, UNFINISHED, scan
from hires.data.source import open_source
from hires.data.textures import make_folder


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def make(path: Path, **how):
    return make_folder(path, **{"classes": 3, "count": 7, "size": (20, 36), "seed": 5} | how)


@pytest.fixture
def third_image_fails(monkeypatch):
    """Lets the disk fill up within the third image."""
    real, calls = tifffile.imwrite, []

    def failing(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"II*\0 half of an image")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(tifffile, "imwrite", failing)


def test_the_folder_can_be_trained_on(tmp_path):
    assert make(tmp_path / "new" / "data") == 7
    path = str(tmp_path / "new" / "data")
    source = open_source(DataConfig(name="folder", path=path), (20, 36), 3, seed=0)
    assert scan(path).class_names == ("texture0", "texture1", "texture2")
    assert [source.label(i) for i in range(len(source))] == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("tiled", [True, False])
def test_images_are_those_of_the_synthetic_source_in_8_bits(tmp_path, tiled):
    size = (300, 41)
    make(tmp_path, size=size, tiled=tiled)
    spans = (0, 300), (0, 41)
    folder = open_source(DataConfig(name="folder", path=str(tmp_path)), size, 3, seed=0)
    memory = open_source(DataConfig(classes=3), size, 3, seed=5)
    for place, number in enumerate((0, 3, 6, 1, 4, 2, 5)):  # class by class
        np.testing.assert_allclose(
            folder.window(place, *spans), memory.window(number, *spans), atol=0.5 * 4 / 255 + 1e-6
        )


def test_tiles_are_256_pixels_or_less(tmp_path):
    for size, tile in (((20, 36), 48), ((600, 30), 256)):
        make(tmp_path / str(tile), size=size, count=3)
        with tifffile.TiffFile(tmp_path / str(tile) / "texture0" / "00000.tif") as file:
            page = file.pages[0]
            assert (page.is_tiled, page.tilelength, page.tilewidth) == (True, tile, tile)


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    make(tmp_path / "a")
    make(tmp_path / "b")
    make(tmp_path / "c", seed=6)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    image = "texture0/00000.tif"
    assert contents(tmp_path / "a")[image] != contents(tmp_path / "c")[image]


def test_a_second_call_finds_everything_there(tmp_path):
    make(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert make(tmp_path) == 0
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}


def test_a_full_disk_leaves_nothing_that_looks_complete(tmp_path, third_image_fails):
    with pytest.raises(RunError, match=r"cannot write images to .*: No space left on device; "):
        make(tmp_path)
    assert sorted(contents(tmp_path)) == [UNFINISHED, "texture0/00000.tif", "texture1/00001.tif"]
    with pytest.raises(ConfigError, match="was not finished"):
        open_source(DataConfig(name="folder", path=str(tmp_path)), (20, 36), 3, seed=0)


def test_an_interrupted_folder_is_continued(tmp_path, third_image_fails):
    with pytest.raises(RunError):
        make(tmp_path / "a")
    assert make(tmp_path / "a") == 5
    make(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_missing_images_are_made_again(tmp_path):
    make(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "texture1" / "00004.tif").unlink()
    assert make(tmp_path) == 1
    assert contents(tmp_path) == before


def test_other_files_are_not_mixed_with(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files that hires did not write; choose"):
        make(tmp_path)
    assert sorted(contents(tmp_path)) == ["thesis.tex"]


def test_images_of_other_settings_are_not_mixed_with(tmp_path):
    make(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="made with count=7, not 9 and seed=5, not 1; choose"):
        make(tmp_path, count=9, seed=1)
    assert contents(tmp_path) == before


def test_a_manifest_that_is_none_is_not_trusted(tmp_path):
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(ConfigError, match=r"cannot be used .*choose another folder"):
        make(tmp_path)


def test_the_manifest_says_what_was_made(tmp_path):
    make(tmp_path)
    note = json.loads((tmp_path / MANIFEST).read_text())
    assert note["classes"] == 3
    assert note["count"] == 7
    assert (note["height"], note["width"]) == (20, 36)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="x is a file"):
        make(tmp_path / "x")


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(RunError, match=r"cannot write images to .*Not a directory"):
        make(tmp_path / "x" / "data")


def test_a_large_image_is_drawn_row_of_tiles_by_row_of_tiles(tmp_path, monkeypatch):
    drawn = []
    real = textures.synthetic.draw

    def noting(label, channels, size, rows, cols, **which):
        drawn.append(rows)
        return real(label, channels, size, rows, cols, **which)

    monkeypatch.setattr(textures.synthetic, "draw", noting)
    make(tmp_path, size=(600, 300), classes=1, count=1)
    assert drawn == [(0, 256), (256, 512), (512, 600)]
