r"""Keeps built engines on disk, each under a key of all that it depends on.

    FILE.engine     {"version": 1, "key": ..., "bytes": 123, "sha256": ...} \n the engine itself

An engine is code for a GPU, so a file is taken only if it is whole, of its key, and writable by
this user alone; anything else is refused with a warning, and the engine is built again. Nothing in
a file is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.errors import HiresError
from hires.core.store.files import cache_dir, make_folder, write_atomically

VERSION = 1
OPTION = "another XDG_CACHE_HOME"
_MOST_HEADER = 1000

log = logging.getLogger(__name__)


class KeptEngine(NamedTuple):
    """An engine as its library writes it."""

    data: bytes
    built: bool
    """Whether it was built now, and not read."""


def engine_key(facts: dict[str, Any]) -> str:
    """Returns 32 digits that differ where any of the facts does; they are plain values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def built_engine(key: str, build: Callable[[], bytes], folder: Path | None = None) -> KeptEngine:
    """Returns the engine of a key from its file, or builds it and writes the file.

    ``folder`` is that of the user's cache if it is None. Of ranks that build the same engine at
    once each writes a whole file, and the last one stays. One that cannot be written is used.
    """
    folder = folder or cache_dir() / "engines"
    path = folder / f"{key}.engine"
    try:
        return KeptEngine(_read(path, key), False)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s is not used (%s); the engine is built again", path, error)
    engine = build()
    facts = {
        "version": VERSION,
        "key": key,
        "bytes": len(engine),
        "sha256": hashlib.sha256(engine).hexdigest(),
    }
    try:
        make_folder(folder, OPTION)
        write_atomically(path, json.dumps(facts).encode() + b"\n" + engine, option=OPTION)
        path.chmod(0o600)  # as read, whatever the mask of new files is
    except (HiresError, OSError) as error:
        log.warning("the engine is not kept, and is built again next time: %s", error)
    return KeptEngine(engine, True)


def _read(path: Path, key: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is no file")
        if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise ValueError("others may write to it")
        line = file.readline(_MOST_HEADER)
        held = json.loads(line)
        if not isinstance(held, dict) or held.get("version") != VERSION:
            raise ValueError("it has no header of this version")
        if held.get("key") != key:
            raise ValueError("it is of another key")
        engine = file.read()
    if len(engine) != held.get("bytes"):
        raise ValueError(f"it has {len(engine)} bytes and says {str(held.get('bytes'))[:20]}")
    if hashlib.sha256(engine).hexdigest() != held.get("sha256"):
        raise ValueError("its bytes have changed")
    return engine
