"""Lists images whose classes stand in a table, or which have none: ``data=images``.

data.path/scans/007.png       data.labels=labels.csv       name,label
                                                           007,benign
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.units import listed
from hires.data.image_format import Size
from hires.data.slide_labels import match_slides
from hires.data.source import SOURCES, Source
from hires.data.sources.folder import FolderIndex, FolderSource, scan
from hires.data.splits import part_of, read_table


@SOURCES.register("images")
class ImageSource(FolderSource):
    """Images anywhere below a folder, with the classes of a table."""

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns the images of ``data.path``, or of its part, that have a class if any has."""
        index = scan(part_of(data), data.name)
        return cls(index if data.labels is None else _labelled(index, data), data, size, channels)

    @classmethod
    def files(cls, data: DataConfig) -> Sequence[str]:
        """Returns the files that it reads."""
        table = [] if data.labels is None else [str(_root(data) / data.labels)]
        return [*super().files(data), *table]


def _root(data: DataConfig) -> Path:
    return Path(data.path or "").expanduser()


def _labelled(index: FolderIndex, data: DataConfig) -> FolderIndex:
    """Returns the images that a table names, by path, name, or name without suffix.

    ConfigError: a line names no image, or two.
    """
    path = _root(data) / str(data.labels)
    table = read_table(path, "name", "label", "data.labels")
    names = {os.path.relpath(image, _root(data)): image for image in index.paths}
    keys = match_slides(table, [*names], f"data.labels={path}")
    if unknown := sorted({*table} - {*keys.values()}):
        raise ConfigError(
            f"data.labels={path} names no image below {index.root} with {listed(unknown)}; write "
            f"paths, names or names without suffix, and take out those that are not there"
        )
    classes = tuple(sorted({*table.values()}))
    labels = tuple(classes.index(table[keys[name]]) for name in names if name in keys)
    paths = tuple(image for name, image in names.items() if name in keys)
    return replace(index, class_names=classes, paths=paths, labels=labels)
