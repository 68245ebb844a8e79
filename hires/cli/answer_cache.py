"""Keeps what the process with torch answered, in the user's cache folder, by what decides it.

    ~/.cache/hires/trace/HASH.json     graph of a network, with hashes of the files it came from
    ~/.cache/hires/memory/HASH.json    memory of every rank of a plan

A damaged entry counts as absent, and those that were not used for longest go first.
``HIRES_CACHE=off`` leaves the cache alone.
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

import hires
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import HiresError
from hires.core.store.files import write_atomically

MOST_BYTES = 256 * 2**20
"""Size of all entries of one kind."""


def cache_dir() -> Path:
    """Returns the folder of this user for what can be made again."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # The standard says to ignore a relative path.
    return (base if base.is_absolute() else Path.home() / ".cache") / "hires"


def read(kind: str, key: str) -> Any:
    """Returns an entry as plain values, or None if there is none that can be read."""
    path = cache_dir() / kind / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        if os.environ.get("HIRES_CACHE") != "off":
            values = json.loads(path.read_text(encoding="utf-8"))
            os.utime(path)
            return values
    return None


def write(kind: str, key: str, values: Any) -> None:
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


def trace_key(config: RunConfig) -> str:
    """Returns the key of a network's trace: the network, the shape of its input, and the task."""
    samples = max(1, config.batch // config.parallel.pieces)
    facts = [to_dict(config)["model"], samples, config.image, config.task.name]
    if config.model.name == "custom":
        # The user's function may draw what it builds; its module is looked up in these folders.
        facts += [config.seed, str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    return key_of(facts)


def same_sources(hashes: Any) -> bool:
    """Whether files have the content that they had when they were traced."""
    try:
        return all(
            hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest
            for path, digest in hashes.items()
        )
    except (OSError, AttributeError, TypeError):
        return False


@functools.cache
def _versions() -> list[Any]:
    """Returns torch's version, and name, size and time of every file of hires."""
    torch = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = importlib.metadata.version("torch")
    folder = Path(hires.__file__).parent
    files = [(path, path.stat()) for path in sorted(folder.rglob("*.py"))]
    code = [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in files]
    return [torch, code]
