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


def test_damaged_entry_counts_as_absent(cache):
    assert store.cached("memory", "key") is None
    store.keep("memory", "key", [1])
    assert store.cached("memory", "key") == [1]
    (cache / "memory" / "key.json").write_text("[1")
    assert store.cached("memory", "key") is None


def test_cache_can_be_turned_off(cache, monkeypatch):
    store.keep("memory", "key", [1])
    monkeypatch.setenv("HIRES_CACHE", "off")
    assert store.cached("memory", "key") is None
    store.keep("memory", "other", [1])
    assert [path.name for path in (cache / "memory").iterdir()] == ["key.json"]


def test_entries_that_were_not_used_for_longest_go_first(cache, monkeypatch):
    monkeypatch.setattr(store, "MOST_BYTES", 250)
    for number, name in enumerate("abc"):
        store.keep("memory", name, "x" * 98)
        os.utime(cache / "memory" / f"{name}.json", (number, number))
    store.cached("memory", "b")
    store.keep("memory", "d", "x" * 98)
    assert sorted(path.stem for path in (cache / "memory").iterdir()) == ["b", "d"]
