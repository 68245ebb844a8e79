"""Files of built engines are taken whole and of their key, or made again with a warning."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hires.engine.engine_files import built_engine, engine_key

FACTS = {"graph": "0123", "shapes": [[2, 3, 8, 8]], "precision": "fp16", "device": "H100"}


@pytest.mark.parametrize("name", FACTS)
def test_key_differs_where_a_fact_does(name):
    assert engine_key(FACTS) == engine_key(dict(reversed(FACTS.items())))
    assert engine_key(FACTS) != engine_key(FACTS | {name: "another"})


def test_engine_is_built_once(tmp_path):
    builds = []

    def build() -> bytes:
        builds.append(1)
        return b"\n{engine}\0"

    first = built_engine("k", build, tmp_path / "new")
    assert first == (b"\n{engine}\0", True)
    again = built_engine("k", build, tmp_path / "new")
    assert (again, len(builds)) == ((first.data, False), 1)
    built_engine("other", build, tmp_path / "new")
    assert len(builds) == 2


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "changed": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "no header": lambda path: path.write_bytes(b"\x80\x04pickle\n"),
    "a list": lambda path: path.write_bytes(b"[]\nengine"),
    "no line": lambda path: path.write_bytes(b"7" * 5000),
    "of another key": lambda path: path.write_bytes(path.read_bytes().replace(b'"k"', b'"z"')),
    "writable by others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_file_that_is_not_whole_is_refused_and_made_again(tmp_path, caplog, name):
    path = tmp_path / "k.engine"
    built_engine("k", lambda: b"engine", tmp_path)
    DAMAGES[name](path)
    with caplog.at_level(logging.WARNING):
        assert built_engine("k", lambda: b"engine", tmp_path) == (b"engine", True)
    [record] = caplog.records
    assert str(path) in record.getMessage()
    assert "built again" in record.getMessage()
    caplog.clear()
    assert built_engine("k", lambda: b"never", tmp_path) == (b"engine", False)


def test_link_is_refused(tmp_path, caplog):
    built_engine("k", lambda: b"engine", tmp_path / "elsewhere")
    (tmp_path / "k.engine").symlink_to(tmp_path / "elsewhere" / "k.engine")
    with caplog.at_level(logging.WARNING):
        assert built_engine("k", lambda: b"own", tmp_path) == (b"own", True)
    assert not (tmp_path / "k.engine").is_symlink()
    assert built_engine("k", lambda: b"never", tmp_path / "elsewhere").data == b"engine"


def test_writers_at_once_leave_one_whole_file(tmp_path):
    meeting = threading.Barrier(4)

    def build(number: int) -> bytes:
        meeting.wait(30)  # all have found no file, and none has written one
        return bytes([number]) * 100_000

    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(lambda n: built_engine("k", lambda: build(n), tmp_path), range(4))]
    assert [one.data[0] for one in made] == [0, 1, 2, 3]
    assert all(one.built for one in made)
    kept = built_engine("k", lambda: b"never", tmp_path)
    assert kept.data in {one.data for one in made}
    assert not kept.built
    assert [path.name for path in tmp_path.iterdir()] == ["k.engine"]


def test_engine_that_cannot_be_kept_is_used(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        made = built_engine("k", lambda: b"engine", tmp_path / "file" / "folder")
    assert made == (b"engine", True)
    assert "is not kept" in caplog.text
