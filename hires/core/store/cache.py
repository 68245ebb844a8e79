"""Keeps answers that cost seconds in the user's cache: ``~/.cache/hires/KIND/KEY.json``.

An entry carries a digest of what it holds and of its key; one that differs, or cannot be read, is
made again, with a warning. ``HIRES_CACHE=off`` leaves the cache alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError
from hires.core.store.files import cache_dir, write_atomically

log = logging.getLogger(__name__)

MOST_BYTES = 256 * 2**20
"""Size of all entries of one kind."""


def cached(kind: str, key: str) -> Any:
    """Returns an entry as plain values, or None if there is none that is whole."""
    if os.environ.get("HIRES_CACHE") == "off":
        return None
    path = cache_dir() / kind / f"{key}.json"
    try:
        values = unsealed(path.read_bytes(), key)
        with contextlib.suppress(OSError):  # of a folder that can only be read
            os.utime(path)
        return values
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("an entry of the cache is made again: %s (%s)", path, error)
        return None


def keep(kind: str, key: str, values: Any) -> None:
    """Adds an entry, and removes the oldest ones if there are too many."""
    if os.environ.get("HIRES_CACHE") == "off":
        return
    folder = cache_dir() / kind
    with contextlib.suppress(HiresError, OSError):  # a folder that cannot be written to stays empty
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{key}.json", sealed(values, key))
        stats = {entry: entry.stat() for entry in folder.glob("*.json")}
        oldest = sorted(stats, key=lambda entry: stats[entry].st_mtime_ns)
        size = sum(stat.st_size for stat in stats.values())
        while size > MOST_BYTES:
            entry = oldest.pop(0)
            entry.unlink(missing_ok=True)
            size -= stats[entry].st_size


def sealed(values: Any, key: str) -> str:
    """Returns values as JSON text with a digest of them and of their key."""
    return json.dumps({"sha256": mark_of(json.dumps(values), key), "values": values})


def unsealed(data: bytes, key: str) -> Any:
    """Returns the values of :func:`sealed`; ValueError: the bytes have changed."""
    try:
        held = json.loads(data)
        if held["sha256"] == mark_of(json.dumps(held["values"]), key):
            return held["values"]
    except (RecursionError, LookupError, TypeError):
        pass
    raise ValueError("its values have changed, or another hires wrote it")


def mark_of(*facts: Any) -> str:
    """Returns the digest of plain values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def key_of(*facts: Any) -> str:
    """Returns the hash of some plain values, of torch's version and of hires' own code."""
    return mark_of(facts, _versions())[:32]


@functools.cache
def _versions() -> list[Any]:
    """Returns torch's version, and name, size and time of every file of hires."""
    torch = ""
    from importlib import metadata  # takes as long as a verb's own start

    with contextlib.suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    folder = Path(__file__).parents[2]
    files = [(path, path.stat()) for path in sorted(folder.rglob("*.py"))]
    code = [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in files]
    return [torch, code]
