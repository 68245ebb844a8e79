"""Is whatever stands in a file a plain value or a note, and never more?"""

from __future__ import annotations

import json
import os

import pytest

from hires.report.load import reading
from hires.report.load.reading import MAX_BYTES, count, dig, flat, number, spoken, text


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


def test_yaml_that_names_itself_a_billion_times_is_walked_a_little(tmp_path):
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 60)]
    path, notes = tmp_path / "config.yaml", []
    path.write_text("\n".join(lines))
    assert len(flat(reading.read_yaml(path, notes))) <= reading.MAX_KEYS


def test_large_file_is_not_read(tmp_path):
    path, notes = tmp_path / "exit.json", []
    path.write_text(json.dumps({"a": "x" * MAX_BYTES["exit.json"]}))
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


def test_numbers_are_finite_and_counts_are_whole():
    assert [number(v) for v in (1, 2.5, float("nan"), float("inf"), True, "3", None, 10**400)] == [
        1.0, 2.5, None, None, None, None, None, None,
    ]  # fmt: skip
    assert [count(v) for v in (0, 3.0, -1, 2.5, 2**63, False)] == [0, 3, None, None, None, None]


def test_text_shows_nothing_invisible_and_ends():
    assert text("a\nb\x1b[31m\u202ec\ud800") == "a b\ufffd[31m\ufffdc\ufffd"
    assert text("x" * 10_000_000, 5) == "xxxxx... (10000000 characters)"
    assert text(7) is None


def test_way_through_what_is_not_there_is_none():
    assert dig({"a": [{"b": 1}]}, "a", 0, "b") == 1
    assert dig({"a": [1]}, "a", 5) is None
    assert dig("text", "a") is None


def test_values_are_spoken_as_one_types_them():
    assert [spoken(v) for v in (True, None, 2, 1.5, "x", [2, [1, 1]], {"a": 1})] == [
        "true", "null", "2", "1.5", "x", "[2,[1,1]]", "(dict)",
    ]  # fmt: skip
    assert spoken([[[[]]]]) == "[...]"
