"""Files in memory: never the last byte of it, and nothing that a killed rank left stays."""

import fcntl
import os
import time

import pytest

from hires.core.errors import RunError
from hires.core.ranks import memory_files


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_files, "FOLDER", tmp_path)
    return tmp_path


def old(path, age_s=3600.0):
    path.write_bytes(b"x")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_file_is_of_zeros_for_this_user_and_its_name_goes(folder):
    with memory_files.memory_file("one", 5000, "a test"):
        [path] = folder.iterdir()
        assert path.read_bytes() == bytes(5000)
        assert path.stat().st_mode & 0o777 == 0o600
    assert not list(folder.iterdir())


def test_what_does_not_fit_is_refused_before_anything_is_written(folder):
    need = memory_files.free_bytes() + 1
    told = r"a test needs .* free; .*comm\.shared_memory=false"
    with pytest.raises(RunError, match=told), memory_files.memory_file("one", need, "a test"):
        pass
    assert not list(folder.iterdir())


def test_disk_that_is_full_all_the_same_leaves_no_file(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fcntl, "flock", full)
    told = "No space left on device"
    with pytest.raises(RunError, match=told), memory_files.memory_file("one", 10, "a test"):
        pass
    assert not list(folder.iterdir())


def test_only_what_certainly_was_left_is_removed(folder):
    dead, young, other = (
        old(folder / name, age_s)
        for name, age_s in (("hires-mail-a", 3600.0), ("hires-mail-b", 1.0), ("hires-data", 3600.0))
    )
    link = folder / "hires-mail-link"
    link.symlink_to(other)
    os.mkfifo(folder / "hires-mail-pipe")
    path = folder / "hires-mail-one"
    with memory_files.memory_file("one", 10, "a test"):
        os.utime(path, (0, 0))  # its maker lives, however old it is
        assert not dead.exists()
        dead = old(folder / "hires-mail-c")
        assert memory_files.left_behind() == [dead]
        memory_files.remove_left_behind()
        assert path.exists()
    assert young.exists()
    assert other.exists()
    assert link.is_symlink()
