"""Digests the images of a folder, so that a run of other images is another run.

An image counts by its name, size and time of change; none is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.store.frozen import DataContent
from hires.data.source import SOURCES
from hires.data.sources.slide import root_of
from hires.data.splits import file_of_split

HAS_FILES = tuple(name for name in SOURCES if SOURCES[name].reads_files)
"""``data.name`` of images that lie below ``data.path``."""


def content_of(data: DataConfig) -> tuple[DataContent, dict[str, str]]:
    """Returns what a folder of images holds, with size and time of each file by its name.

    Errors are those of :meth:`Source.files`, and a ConfigError names a file that cannot be read.
    """
    root, files, num_bytes = str(root_of(data)), dict[str, str](), 0
    for path in _paths(data):
        try:
            stat = Path(path).stat()
        except OSError as error:
            raise ConfigError(f"the image {path} cannot be read: {error.strerror}") from None
        files[path.removeprefix(root).lstrip("/")] = f"{stat.st_size} {stat.st_mtime_ns}"
        num_bytes += stat.st_size
    return DataContent(_digest(files), len(files), num_bytes), files


def is_unchanged(data: DataConfig, content: DataContent) -> bool:
    """Whether a folder still holds what it held; ConfigError: it cannot be read."""
    return data.name not in HAS_FILES or content_of(data)[0].digest == content.digest


def data_changes(old: Mapping[str, str] | None, new: Mapping[str, str] | None) -> str:
    """Returns in words how the files of two contents differ; None: they are not known."""
    if old is None or new is None:
        return "the images have changed"
    parts = []
    for verb, names in (
        ("added", [name for name in new if name not in old]),
        ("removed", [name for name in old if name not in new]),
        ("replaced", [name for name in new if name in old and old[name] != new[name]]),
    ):
        if names:
            images = "1 image was" if len(names) == 1 else f"{len(names)} images were"
            parts.append(f"{images} {verb} ({names[0]}{', ...' if len(names) > 1 else ''})")
    return " and ".join(parts) or "the images have changed"


def _paths(data: DataConfig) -> Sequence[str]:
    paths, split = SOURCES[data.name].files(data), file_of_split(data)
    return paths if split is None else [*paths, str(split)]


def _digest(values: Mapping[str, str]) -> str:
    lines = (f"{name}\0{value}\n" for name, value in sorted(values.items()))
    whole = hashlib.sha256()
    for line in lines:
        whole.update(line.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()
