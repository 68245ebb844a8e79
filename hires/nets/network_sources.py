"""Lists the source files that a user's network came from, so that its trace can be kept.

A trace is stale once one of these files has changed: modules that were imported while the network
was built, and all that are neither of Python, of hires nor installed (a forward pass may import).
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import hires

_STARTED_NS = time.time_ns()
_OWN = Path(hires.__file__).parent
_PYTHON = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_INSTALLED = {"site-packages", "dist-packages"}
_built: set[str] = set()
"""Names of modules that networks imported while they were built by this process."""


@contextlib.contextmanager
def noting_imports() -> Iterator[None]:
    """Notes the modules that are imported in a block."""
    before = set(sys.modules)
    try:
        yield
    finally:
        _built.update(set(sys.modules) - before)


def source_hashes() -> dict[str, str] | None:
    """Returns the SHA-256 of every source file, by its absolute path.

    None if a file may have changed since it was imported: its hash may be of other code.
    """
    hashes = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not Path(file).is_absolute():
            continue  # torch.ops and the like name files that are not there
        path = Path(file)
        installed = any(path.is_relative_to(folder) for folder in _PYTHON)
        installed = installed or not _INSTALLED.isdisjoint(path.parts)
        if path.is_relative_to(_OWN) or (installed and name not in _built):
            continue
        try:
            changed_ns = path.stat().st_mtime_ns
            hashes[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            return None
        if changed_ns >= _STARTED_NS:
            return None
    return hashes
