"""Digests the images of a folder, so that a run of other images is another run.

An image counts by its name, size and time of change; none is read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.store.frozen import DataContent
from hires.data.source import SOURCES
from hires.data.sources.slide import root_of
from hires.data.splits import file_of_split

HAS_FILES = tuple(name for name in SOURCES if SOURCES[name].reads_files)
"""``data.name`` of images that lie below ``data.path``."""


def content_of(data: DataConfig) -> DataContent:
    """Returns what a folder of images holds, by the size and time of each file.

    Errors are those of :meth:`Source.files`, and a ConfigError names a file that cannot be read.
    """
    root, files, num_bytes = str(root_of(data)), dict[str, str](), 0
    paths, split = SOURCES[data.name].files(data), file_of_split(data)
    for path in paths if split is None else [*paths, str(split)]:
        try:
            stat = Path(path).stat()
        except OSError as error:
            raise ConfigError(f"the image {path} cannot be read: {error.strerror}") from None
        files[path.removeprefix(root).lstrip("/")] = f"{stat.st_size} {stat.st_mtime_ns}"
        num_bytes += stat.st_size
    whole = hashlib.sha256()
    for name, value in sorted(files.items()):
        whole.update(f"{name}\0{value}\n".encode("utf-8", "surrogateescape"))
    return DataContent(whole.hexdigest(), len(files), num_bytes)


def is_unchanged(data: DataConfig, content: DataContent) -> bool:
    """Whether a folder still holds what it held; ConfigError: it cannot be read."""
    return data.name not in HAS_FILES or content_of(data).digest == content.digest
