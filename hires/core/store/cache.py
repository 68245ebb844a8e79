"""Keeps answers that cost seconds in the user's cache: ``~/.cache/hires/KIND/KEY.json``.

``HIRES_CACHE=off`` leaves the cache alone; a damaged entry counts as absent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError
from hires.core.store.files import cache_dir, write_atomically

MOST_BYTES = 256 * 2**20
"""Size of all entries of one kind."""


def cached(kind: str, key: str) -> Any:
    """Returns an entry as plain values, or None if there is none that can be read."""
    path = cache_dir() / kind / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        if os.environ.get("HIRES_CACHE") != "off":
            values = json.loads(path.read_text(encoding="utf-8"))
            os.utime(path)
            return values
    return None


def keep(kind: str, key: str, values: Any) -> None:
    """Adds an entry, and removes the oldest ones if there are too many."""
    if os.environ.get("HIRES_CACHE") == "off":
        return
    folder = cache_dir() / kind
    with contextlib.suppress(HiresError, OSError):  # a folder that cannot be written to stays empty
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{key}.json", json.dumps(values))
        stats = {entry: entry.stat() for entry in folder.glob("*.json")}
        oldest = sorted(stats, key=lambda entry: stats[entry].st_mtime_ns)
        size = sum(stat.st_size for stat in stats.values())
        while size > MOST_BYTES:
            entry = oldest.pop(0)
            entry.unlink(missing_ok=True)
            size -= stats[entry].st_size


def key_of(*facts: Any) -> str:
    """Returns the hash of some plain values, of torch's version and of hires' own code."""
    text = json.dumps([facts, _versions()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _versions() -> list[Any]:
    """Returns torch's version, and name, size and time of every file of hires."""
    torch = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = importlib.metadata.version("torch")
    folder = Path(__file__).parents[2]
    files = [(path, path.stat()) for path in sorted(folder.rglob("*.py"))]
    code = [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in files]
    return [torch, code]
