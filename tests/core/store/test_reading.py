"""Tests of the readers of files that may be damaged, hostile or too large."""

from __future__ import annotations

import json
import os

import pytest

from hires.core.errors import RunError
from hires.core.store import file_names, reading
from hires.core.store.reading import text


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 200_000, b'{"a": ' * 200_000, b"nul", b"\0" * 9],
)
def test_damaged_json_is_a_note(tmp_path, data):
    path, notes = tmp_path / "record.json", []
    path.write_bytes(data)
    assert reading.read_json(path, notes) == {}
    assert len(notes) == 1
    assert "record.json" in notes[0].where


@pytest.mark.parametrize(
    "data", [b"a: [", b"- 1", b"!!python/object/apply:os.system ['true']", b"a: &x [*x]\nb: *y"]
)
def test_damaged_yaml_is_a_note(tmp_path, data):
    path, notes = tmp_path / "config.yaml", []
    path.write_bytes(data)
    assert reading.read_yaml(path, notes) == {}
    assert len(notes) == 1


def test_large_file_is_not_read(tmp_path):
    path, notes = tmp_path / "exit.json", []
    path.write_text(json.dumps({"a": "x" * file_names.MIB}))
    assert reading.read_json(path, notes) == {}
    assert "MiB" in notes[0].text


def test_pipe_with_the_name_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "record.json")
    notes = []
    assert reading.read_json(tmp_path / "record.json", notes) == {}
    assert notes[0].text == "not a plain file, and left out"


def test_missing_file_is_worth_a_note_only_where_it_is_needed(tmp_path):
    notes = []
    assert reading.read_json(tmp_path / "record.json", notes) == {}
    assert notes == []
    reading.read_json(tmp_path / "plan.json", notes, needed=True)
    assert [note.text for note in notes] == ["No such file or directory"]


def test_torn_lines_are_counted(tmp_path):
    path, notes = tmp_path / "metrics.jsonl", []
    path.write_bytes(b'{"a": 1}\n{"a": \n7\n\xff\n{"a": 2}\n')
    assert [line["a"] for line in reading.read_lines(path, notes)] == [1, 2]
    assert notes[0].text == "3 torn lines left out"


def test_text_shows_nothing_invisible_and_ends():
    assert text("a\nb\x1b[31m\u202ec\ud800") == "a b\ufffd[31m\ufffdc\ufffd"
    assert text("x" * 10_000_000, 5) == "xxxxx... (10000000 characters)"
    assert text(7) is None


@pytest.mark.parametrize("data", [b"{", b"[1]", b"Infinity", b"NaN", b"[" * 200_000])
def test_without_notes_a_damaged_file_raises(tmp_path, data):
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(RunError, match=r"plan\.json is damaged .*run the experiment again"):
        reading.read_json(tmp_path / "plan.json")


@pytest.mark.parametrize("read", [reading.read_json, reading.read_yaml])
def test_neither_pipe_nor_folder_nor_huge_file_is_read(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(10 * 2**30)
    for name in ("pipe", "folder", "huge"):
        notes = []
        assert read(tmp_path / name, notes) == {}
        assert len(notes) == 1
        with pytest.raises(RunError, match=f"cannot read .*{name}"):
            read(tmp_path / name)


def test_first_bytes_of_a_large_file_are_read(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"a": 1}\n' + b"x" * 3 * file_names.MIB)
    assert reading.read_bytes(tmp_path / "events.jsonl", first=9) == b'{"a": 1}\n'


def test_aliases_that_stand_for_a_billion_values_are_damage(tmp_path):
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 60)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    notes = []
    assert reading.read_yaml(tmp_path / "config.yaml", notes) == {}
    assert "aliases" in notes[0].text
    with pytest.raises(RunError, match="aliases"):
        reading.read_yaml(tmp_path / "config.yaml")
