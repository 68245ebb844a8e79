"""Which of the files that Python opens count as inputs of a network?"""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.nets import opened_files
from hires.nets.opened_files import OpenedFiles


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    for name in (*opened_files._NAMED, "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1")
    return path


def read(*paths: Path) -> OpenedFiles:
    opened = OpenedFiles()
    with opened.noting():
        for path in paths:
            path.read_text()
    return opened


def test_caches_and_settings_are_no_inputs(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("MPLCONFIGDIR", "relative")
    names = ["home/.cache/matplotlib/fonts.json", "home/.config/key", "settings/key", "hub/token"]
    counted = [made(tmp_path / name) for name in ("hub/blobs/config.json", "work/widths.json")]
    counted.append(made(home / "token"))
    others = [made(tmp_path / name) for name in names]
    assert set(read(*counted, *others).read()) == set(counted)
    monkeypatch.chdir(home / ".cache")  # the work itself is there
    assert set(read(*others).read()) == {others[0]}


def test_file_that_is_written_is_no_input(home):
    opened, path, final = OpenedFiles(), Path("list.json").absolute(), Path("final").absolute()
    kept = made(Path("kept").absolute())
    with opened.noting():
        path.write_text("1")
        path.read_text()
        path.replace(final)
        final.read_text()
        kept.read_text()
    assert opened.read() == [kept]


def test_more_files_than_are_noted_are_seen(home, monkeypatch):
    monkeypatch.setattr(opened_files, "MOST_FILES", 2)
    paths = [made(Path(f"{n}.txt").absolute()) for n in range(3)]
    assert not read(*paths[:2], *paths[:2]).is_full
    opened = read(*paths)
    assert opened.is_full
    assert opened.read() == paths[:2]
