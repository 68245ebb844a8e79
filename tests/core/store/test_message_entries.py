"""Are single messages read back as they were written, and damaged files noted?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.core.errors import RunError
from hires.core.store import message_entries
from hires.core.store.file_names import rank_messages
from hires.core.store.message_entries import ENTRY

HEADER = {
    "clock": "a machine", "dropped": 3, "operations": ["send", "recv"],
    "ways": {"64": ["shm", "mailbox"]}, "events": {"7": ["halo", "F0", [1]]},
}  # fmt: skip
ENTRIES = ENTRY.pack(1, 64, 7, 4096, 1.0, 1.5, 2.0, 3.0) + ENTRY.pack(0, 64, -1, 0, 1, 1, 1, 1)


def test_messages_come_back(tmp_path):
    for rank in (1, 0):
        message_entries.write(tmp_path, rank, HEADER, ENTRIES)
    ranks = list(message_entries.read(tmp_path))
    assert [(one.rank, one.clock, one.dropped) for one in ranks] == [
        (0, "a machine", 3), (1, "a machine", 3),
    ]  # fmt: skip
    first, outside = ranks[1].messages
    assert list(vars(first).values()) == [
        1, "recv", "halo", "F0", [1], 4096, "shm", "mailbox", 1.0, 1.5, 2.0, 3.0,
    ]  # fmt: skip
    assert (outside.kind, outside.action, outside.ranks, outside.operation) == ("", "", [], "send")


def test_attempt_without_them_has_none(tmp_path):
    assert list(message_entries.read(tmp_path)) == []


def damaged(folder: Path) -> list[bytes]:
    message_entries.write(folder, 0, HEADER, ENTRIES)
    whole = rank_messages(folder, 0).read_bytes()
    line, _, entries = whole.partition(b"\n")
    odd = [None, [], {}, -1, "x", 1e300, [None], {"64": 5}, {"7": ["halo"]}, {"7": [0, 0, 0]}]
    changed = [{**json.loads(line), key: value} for key in json.loads(line) for value in odd]
    nan = ENTRY.pack(0, 64, 7, 8, float("nan"), 1, 1, 1)
    return [
        b"", b"\n", line, whole[:-1], whole + b"x", b"[" * 100_000, b"\xff" + whole, entries,
        *(line + b"\n" + one for one in (nan, ENTRY.pack(9, 64, 7, 8, 1, 1, 1, 1))),
        *(line + b"\n" + ENTRY.pack(0, way, at, size, 1, 1, 1, 1) for way, at, size in (
            (63, 7, 8), (64, 6, 8), (64, 7, -8))),
        *(json.dumps(one).encode() + b"\n" + entries for one in changed),
    ]  # fmt: skip


def test_damaged_file_is_a_note_and_never_a_traceback(tmp_path):
    path = rank_messages(tmp_path, 0)
    empty = 0
    for data in damaged(tmp_path):
        path.write_bytes(data)
        notes: list = []
        read = list(message_entries.read(tmp_path, notes))
        assert bool(read) != bool(notes), data[:200]
        empty += bool(read)
        for note in notes:
            assert path.name in note.where
            with pytest.raises(RunError):
                list(message_entries.read(tmp_path))
    assert empty <= 6  # a header without entries, or one in which a name is another
