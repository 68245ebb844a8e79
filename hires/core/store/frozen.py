"""Records the inputs of a run and detects later changes.

A run is its config, the files of a network of the user's, and the images of a folder. Its name
holds the digests of these files and images, so a run of others has another folder. ``frozen.json``
keeps all that, and digests of the frozen files: a run of which something was edited meanwhile is
refused, with the command of a new run. Sources of modules of the user's are found without importing
them, which would run them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from hires.core.config.fields import build
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, EditedError
from hires.core.store import file_names, reading
from hires.core.store.attempts import reproduce_line_of
from hires.core.store.file_names import StrPath
from hires.core.store.naming import identity, plain
from hires.core.units import listed

SCHEMA = 1
LENGTH = ("steps", "measure")
"""Keys in which a run may differ from one that it continues: its state after a step is the same."""
MOST_READ = 64 * 2**30
"""Bytes of a file that is read for its digest; a folder may be a stranger's."""
_BY_VERSION = ("hires", "torch")
"""Packages whose files are a matter of their versions."""
_SETTLE_S = 1.0


@dataclass(frozen=True)
class SourceFile:
    """A source file of a network of the user's, or one of ``model.files``."""

    name: str
    """What names the file wherever the network lies: its path in the package."""
    path: str
    """Absolute, where it was when the run was planned."""
    sha256: str
    size: int = -1
    """Bytes."""
    mtime_ns: int = 0


@dataclass(frozen=True)
class DataContent:
    """The images of a folder."""

    digest: str
    """Of their names, sizes and times of change, wherever the folder lies."""
    images: int
    num_bytes: int


@dataclass(frozen=True)
class RunInputs:
    """What decides a run beside its config; empty of a network of hires and made-up images."""

    network: tuple[SourceFile, ...] = ()
    data: DataContent | None = None
    table: str = ""
    """Digest of the tuning table; nothing of one that ships with hires."""
    weights: str = ""
    """Digest of what ``weights`` names; nothing of first weights from the seed."""
    scales: str = ""
    """Digest of the scales of ``precision=int8``."""
    loss: str = ""
    """Digest of the source of ``loss.target``."""

    @property
    def digests(self) -> dict[str, str]:
        """Returns ``network``, ``data``, ``table``, ``weights``, ``scales`` and ``loss``, if any.

        Each is 16 digits.
        """
        found = {}
        if self.network:
            found["network"] = digest({file.name: file.sha256 for file in self.network})
        if self.data is not None:
            found["data"] = self.data.digest[:16]
        texts = {name: getattr(self, name) for name in ("table", "weights", "scales", "loss")}
        return found | {name: text for name, text in texts.items() if text}


@dataclass(frozen=True)
class Frozen:
    """What ``frozen.json`` holds."""

    config: str
    """Digest of the config without cosmetic keys."""
    series: str
    """The same without :data:`LENGTH`: equal for runs of which a longer one continues a shorter."""
    files: Mapping[str, str]
    """SHA-256 of ``config.yaml`` and ``plan.json``."""
    inputs: RunInputs

    def continues(self, other: Frozen) -> bool:
        """Whether the runs differ in their length at most."""
        return self.series == other.series and self.inputs.digests == other.inputs.digests

    def text(self) -> str:
        """Returns the text of the file."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"


def frozen_of(config: RunConfig, files: Mapping[str, str], inputs: RunInputs) -> Frozen:
    """Returns what is kept of a run whose frozen ``files``, by name, have these texts."""
    values = identity(plain(config))
    series = {key: value for key, value in values.items() if key not in LENGTH}
    return Frozen(digest(values), digest(series), hashes(files), inputs)


def hashes(files: Mapping[str, str]) -> dict[str, str]:
    """Returns the SHA-256 of some texts, by the names of their files."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}


def read(run: StrPath) -> Frozen | None:
    """Returns what a run was frozen from; None, and a warning: the file is missing or damaged."""
    path, notes = Path(run) / file_names.FROZEN, reading.Warned()
    values = reading.read_json(path, notes, needed=file_names.exists(Path(run) / file_names.CONFIG))
    if not values:
        return None
    try:
        inputs = build(RunInputs, values["inputs"])
        files = {str(name): str(value) for name, value in (values.get("files") or {}).items()}
        return Frozen(str(values["config"]), str(values["series"]), files, inputs)
    except (ConfigError, AttributeError, KeyError, TypeError) as error:
        reading.damaged(path, str(error), notes)
        return None


def source_file(name: str, path: Path) -> SourceFile | None:
    """Returns a file as it is now; None if it cannot be read, or has too many bytes."""
    try:
        now = path.stat()  # before it is read: one that is edited meanwhile has another time
    except OSError:
        return None
    sha256 = sha256_of(path)
    if sha256 is None:
        return None
    return SourceFile(name, str(path), sha256, now.st_size, now.st_mtime_ns)


def digest(values: Any) -> str:
    """Returns 16 digits that differ where plain values do."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def frozen_sha256(run: Path, name: str) -> str | None:
    """Returns the digest that a frozen file has now; None if it cannot be read."""
    return sha256_of(run / name, file_names.MAX_BYTES.get(name, file_names.MIB))


def sha256_of(path: Path, most: int = MOST_READ) -> str | None:
    """Returns the digest of a file; None if it cannot be read, or has more bytes than ``most``."""
    found = hashlib.sha256()
    try:
        with reading.open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > most:
                return None
            while chunk := file.read(min(most + 1, file_names.MIB)):
                found.update(chunk)
                most -= len(chunk)
                if most < 0:
                    return None
    except OSError:
        return None
    return found.hexdigest()


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
    spec = None
    for part in name.split("."):
        # By its last name: that of a namespace package would ask for its parents, not imported.
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec


def require_unchanged(run: StrPath, by_time: bool = False) -> None:
    """Raises an EditedError if a frozen file, or a file of the network, was edited.

    Files of the network are read; ``by_time``, only those whose size or time has changed, since all
    ranks of a large run would read its weights at once.
    """
    if _edit(Path(run), by_time) is None:
        return
    time.sleep(_SETTLE_S)  # a file server may show a file late that another node has just replaced
    why = _edit(Path(run), by_time)
    if why is not None:
        raise EditedError(why)


def _edit(run: Path, by_time: bool) -> str | None:
    """Returns what was edited and what to do about it; None if nothing was."""
    held = read(run)
    if held is None:
        return None
    for name in held.files:
        if frozen_sha256(run, name) != held.files[name]:
            return (
                f"{run / name} was edited after the run was planned, and its numbers would stand "
                f"under a wrong name; undo the edit, or start a run of its own with the keys "
                f"that you want{_again(run)}"
            )
    edited = edited_sources(held.inputs, by_time)
    if not edited:
        return None
    return (
        f"{listed(edited)} of the network has changed since the run was planned; undo the "
        f"edit, or start it as a run of its own{_again(run)}"
    )


def edited_sources(inputs: RunInputs, by_time: bool = False) -> list[str]:
    """Returns the paths of the network's files that are not as they were.

    ``by_time``, files of the same size and time are not read.
    """
    edited = []
    for file in inputs.network:
        try:
            now = Path(file.path).stat()
        except (OSError, ValueError):  # it is gone, or no path
            edited.append(file.path)
            continue
        if by_time and (file.size, file.mtime_ns) == (now.st_size, now.st_mtime_ns):
            continue
        may_be_same = stat.S_ISREG(now.st_mode) and file.size in (-1, now.st_size)
        if not may_be_same or sha256_of(Path(file.path)) != file.sha256:
            edited.append(file.path)
    return edited


def _again(run: Path) -> str:
    line = reproduce_line_of(run)
    return f": `{line}`" if line else f" (see {shlex.quote(str(run / file_names.LAUNCH_SCRIPT))})"
