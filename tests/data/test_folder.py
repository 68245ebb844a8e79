import logging
import os
from pathlib import Path

import pytest

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data.folder import UNFINISHED, scan
from hires.data.source import open_source


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image at all: the index reads names only")


def test_classes_are_sub_folders_in_the_order_of_their_names(tmp_path):
    touch(tmp_path, "b/2.png", "b/1.JPG", "a/x.tiff", "C/deep/er/y.Tif", "a/w.jpeg")
    index = scan(str(tmp_path))
    assert index.class_names == ("C", "a", "b")
    assert [p.removeprefix(f"{tmp_path}/") for p in index.paths] == [
        "C/deep/er/y.Tif",
        "a/w.jpeg",
        "a/x.tiff",
        "b/1.JPG",
        "b/2.png",
    ]
    assert index.labels == (0, 1, 1, 2, 2)


def test_other_and_hidden_files_are_ignored_and_counted(tmp_path, caplog):
    touch(
        tmp_path,
        "a/1.png",
        "a/notes.txt",
        "a/.2.png",
        ".git/3.png",
        "README",
        "a/.x/4.png",
        "a/png",
    )
    with caplog.at_level(logging.INFO):
        index = scan(str(tmp_path))
    assert len(index.paths) == 1
    assert "2 files that are no images are ignored" in caplog.text


def test_the_source_knows_classes_and_labels_without_reading_pixels(tmp_path):
    touch(tmp_path, "cat/1.png", "dog/1.png", "dog/2.png")
    source = open_source(DataConfig(name="folder", path=str(tmp_path)), (8, 8), 3, seed=0)
    assert source.num_classes == 2
    assert len(source) == 3
    assert [source.label(i) for i in range(3)] == [0, 1, 1]


def test_a_home_folder_is_understood(tmp_path, monkeypatch):
    touch(tmp_path, "images/a/1.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(scan("~/images").paths) == 1


def test_a_missing_path_is_asked_for():
    with pytest.raises(ConfigError, match=r"needs data\.path=FOLDER"):
        scan(None)


def test_a_missing_folder_is_named_with_the_remedy(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data\.path=.*nowhere does not exist; .*hires data make"
    ):
        scan(str(tmp_path / "nowhere"))


def test_a_name_that_no_system_takes_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path=.*xxx cannot be listed"):
        scan(str(tmp_path / ("x" * 300)))


def test_a_file_is_no_data_folder(tmp_path):
    touch(tmp_path, "file")
    with pytest.raises(ConfigError, match=r"data\.path=.* is a file"):
        scan(str(tmp_path / "file"))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path=.* holds no sub-folders; put the images"):
        scan(str(tmp_path))


def test_images_without_classes_are_refused(tmp_path):
    touch(tmp_path, "1.png")
    with pytest.raises(ConfigError, match="holds images but no sub-folders"):
        scan(str(tmp_path))


def test_a_folder_without_images_is_refused(tmp_path):
    touch(tmp_path, "a/x.txt", "b/y.txt")
    with pytest.raises(ConfigError, match=r"no images below its 2 sub-folders; .*\*\.png"):
        scan(str(tmp_path))


def test_a_class_without_images_is_named(tmp_path):
    touch(tmp_path, "a/1.png", "b/y.txt", "c/y.txt")
    with pytest.raises(ConfigError, match=r"data\.path=.*class 'b' and 1 more has no images"):
        scan(str(tmp_path))


def test_an_unfinished_folder_is_refused(tmp_path):
    touch(tmp_path, "a/1.png", UNFINISHED)
    with pytest.raises(ConfigError, match=r"data\.path=.* was not finished; repeat"):
        scan(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_named(tmp_path):
    touch(tmp_path, "a/1.png")
    (tmp_path / "a").chmod(0)
    with pytest.raises(ConfigError, match="cannot be listed"):
        scan(str(tmp_path))


def test_what_the_system_says_about_a_folder_is_passed_on(tmp_path, monkeypatch):
    touch(tmp_path, "a/1.png")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"data\.path=.*cannot be listed \(Permission denied\)"):
        scan(str(tmp_path))
