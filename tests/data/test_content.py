"""Does the digest of a folder follow the content of its images, and nothing else?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data import content
from hires.data.content import KnownFiles, content_of, data_changes, is_unchanged


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    for name in ("cats/a.png", "cats/b.png", "dogs/c.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        os.utime(path, (1e9, 1e9))
    return DataConfig("folder", str(tmp_path / "images"))


def digest(data, known=None):
    return content_of(data, known or KnownFiles())[0].digest


def file(data, name="cats/a.png"):
    return Path(data.path) / name


@pytest.mark.parametrize("change", ["touch", "copy", "other file"])
def test_equal_images_are_equal(data, change, tmp_path):
    before, known = digest(data), KnownFiles()
    if change == "touch":
        os.utime(file(data))
    elif change == "copy":
        shutil.copytree(data.path, tmp_path / "copy")
        data = DataConfig("folder", str(tmp_path / "copy"))
    else:
        file(data, "cats/notes.txt").write_text("no image")
    assert digest(data, known) == before


@pytest.mark.parametrize("change", ["added", "removed", "replaced", "renamed"])
def test_other_images_are_other_data(data, change):
    known = KnownFiles()
    before, old = content_of(data, known)
    if change == "added":
        file(data, "dogs/d.png").write_bytes(b"d")
    elif change == "removed":
        file(data).unlink()
    elif change == "renamed":
        file(data).rename(file(data, "cats/z.png"))
    else:  # of the same size, and made to look as old
        file(data).write_bytes(b"cats/A.png")
        os.utime(file(data), (1e9, 1e9))
    after, new = content_of(data, known)
    assert after.digest != before.digest
    assert not is_unchanged(data, before)
    words = data_changes(old, new)
    assert (
        words
        == {
            "added": "1 image was added (dogs/d.png)",
            "removed": "1 image was removed (cats/a.png)",
            "replaced": "1 image was replaced (cats/a.png)",
            "renamed": "1 image was added (cats/z.png) and 1 image was removed (cats/a.png)",
        }[change]
    )


def test_content_is_read_once(data, monkeypatch):
    known = KnownFiles()
    monkeypatch.setattr(content, "_SETTLED_NS", -(10**18))  # as if they had lain there for long
    first = digest(data, known)
    assert known.num_read == 3
    assert digest(data, known) == first
    assert known.num_read == 0
    file(data).write_bytes(b"new")
    assert digest(data, known) != first
    assert known.num_read == 1


def test_file_that_was_just_written_is_read_again(data):
    known = KnownFiles()
    digest(data, known)
    assert not known.files  # their entries changed a moment ago, whatever their own times say


def test_of_much_data_sizes_and_times_count(data, monkeypatch):
    monkeypatch.setattr(content, "MOST_BYTES", 1)
    known = KnownFiles()
    before = digest(data, known)
    assert known.num_read == 0
    assert digest(data) == before
    os.utime(file(data))
    assert digest(data) != before


def test_touched_folder_is_read_again_before_it_counts_as_changed(data):
    before, _ = content_of(data, KnownFiles())
    os.utime(file(data))
    assert is_unchanged(data, before)


def test_pipe_in_place_of_an_image_is_refused(data):
    file(data).unlink()
    os.mkfifo(file(data))
    with pytest.raises(ConfigError, match=r"cats/a\.png cannot be read"):
        digest(data)
