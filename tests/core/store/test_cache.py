"""Is the user's cache bounded, and harmless where it is damaged or off?"""

from __future__ import annotations

import os

import pytest

from hires.core.store import cache as store


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    return tmp_path / "hires"


VALUES = {"nodes": [{"eps": 1e-05, "name": "norm"}], "none": None}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b"1e-05", b"1e-04"),
        lambda data: data.replace(b"norm", b"nnrm"),
        lambda data: data.replace(b"null", b"true"),
        lambda data: data[:-2],
        lambda data: data + b" ",
        lambda data: b"",
        lambda data: b"null",
        lambda data: b'"text"',
        lambda data: b"\xff" + data,
        lambda data: b"[" * 200_000 + b"]" * 200_000,
        lambda data: data.replace(data[15:20], b"00000"),
    ],
)
def test_entry_that_has_changed_counts_as_absent_and_is_named(cache, caplog, damage):
    assert store.cached("memory", "key") is None
    store.keep("memory", "key", VALUES)
    assert store.cached("memory", "key") == VALUES
    assert not caplog.records
    path = cache / "memory" / "key.json"
    path.write_bytes(damage(path.read_bytes()))
    assert store.cached("memory", "key") is None
    assert str(path) in caplog.text
    store.keep("memory", "key", VALUES)
    assert store.cached("memory", "key") == VALUES


def test_entry_of_another_key_is_not_believed(cache):
    store.keep("memory", "other", VALUES)
    (cache / "memory" / "other.json").rename(cache / "memory" / "key.json")
    assert store.cached("memory", "key") is None


def test_entry_that_cannot_be_read_is_named(cache, caplog):
    (cache / "memory" / "key.json").mkdir(parents=True)
    assert store.cached("memory", "key") is None
    assert "key.json" in caplog.text


def test_cache_can_be_turned_off(cache, monkeypatch):
    store.keep("memory", "key", [1])
    monkeypatch.setenv("HIRES_CACHE", "off")
    assert store.cached("memory", "key") is None
    store.keep("memory", "other", [1])
    assert [path.name for path in (cache / "memory").iterdir()] == ["key.json"]


def test_entries_that_were_not_used_for_longest_go_first(cache, monkeypatch):
    monkeypatch.setattr(store, "MOST_BYTES", 450)
    for number, name in enumerate("abc"):
        store.keep("memory", name, "x" * 98)
        os.utime(cache / "memory" / f"{name}.json", (number, number))
    store.cached("memory", "b")
    store.keep("memory", "d", "x" * 98)
    assert sorted(path.stem for path in (cache / "memory").iterdir()) == ["b", "d"]


def test_key_changes_with_the_code_and_with_torch(monkeypatch):
    keys = {store.key_of("graph", 1), store.key_of("graph", 2)}
    for versions in (["2.13", [["a.py", 1, 1]]], ["2.14", [["a.py", 1, 1]]], ["2.14", []]):
        monkeypatch.setattr(store, "_versions", lambda versions=versions: versions)
        keys.add(store.key_of("graph", 1))
    assert len(keys) == 5
