"""Finds the source files of modules of the user's without importing them, which would run them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hires.core.errors import ConfigError
from hires.core.store.frozen import SourceFile, sha256_of, source_file

_BY_VERSION = ("hires", "torch")
"""Packages whose files are a matter of their versions."""


def module_digest(target: str) -> str:
    """Returns 16 digits of the source that ``package.module:function`` names; none: not found."""
    spec = _spec(target.partition(":")[0])
    file = None if spec is None or not spec.has_location else spec.origin
    digest = None if file is None else sha256_of(Path(file))
    return (digest or "")[:16]


def network_sources(target: str, files: Sequence[str] = ()) -> tuple[SourceFile, ...]:
    """Returns the files that decide a network, as they are now; nothing of a target not found.

    These are all sources of the package that ``package.module:function`` names, or those of the
    folder of a module that is in no package, and then ``files``. ConfigError: one cannot be read.
    """
    named = dict(_sources(target.partition(":")[0].partition(".")[0]))
    for file in files:
        path = Path(file).absolute()
        if not path.is_file():
            raise ConfigError(f"model.files={file} is no file; name files that the network reads")
        named[file] = path
    sources = []
    for name, path in named.items():
        source = source_file(name, path)
        if source is None:
            raise ConfigError(f"{path}, which the network is made of, cannot be read")
        sources.append(source)
    return tuple(sources)


def _sources(package: str) -> Iterator[tuple[str, Path]]:
    spec = None if package in _BY_VERSION else _spec(package)
    if spec is None:
        return
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder)
            if path.is_file() and not any(part.startswith(".") for part in inner.parts):
                yield f"{package}/{inner.as_posix()}", path
    if spec.submodule_search_locations is None and spec.has_location and spec.origin:
        module = Path(spec.origin)
        for path in sorted({module, *module.parent.glob("[!.]*.py")}):
            if path.is_file():  # no module of an archive
                yield path.name, path


def _spec(name: str) -> ModuleSpec | None:
    # As ranks will find it: the current folder comes last (hires.nets.custom).
    places: list[str] | None = [*sys.path, str(Path.cwd())]
    parts, spec = name.split("."), None
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec
