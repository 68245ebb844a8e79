"""Finds the source file of a module of the user's without importing it, which would run it."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from hires.core.store.frozen import sha256_of


def module_digest(target: str) -> str:
    """Returns 16 digits of the source that ``package.module:function`` names; none: not found."""
    file = _module_file(target.partition(":")[0])
    digest = None if file is None else sha256_of(file)
    return (digest or "")[:16]


def _module_file(name: str) -> Path | None:
    # As ranks will find it: the current folder comes last (hires.nets.custom).
    places: list[str] | None = [*sys.path, str(Path.cwd())]
    parts, found = name.split("."), None
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
        found = spec.origin if spec.has_location else None
    return None if found is None else Path(found)
