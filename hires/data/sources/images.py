"""Lists images whose classes or numbers stand in a table, or which have none: ``data=images``.

data.path/scans/007.png      data.labels=labels.csv   name,label     name,cat,dog    name,age,weight
                             data.targets=            007,benign     007,1,0         007,41.5,70
                                                      class          classes         numbers
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.units import listed
from hires.data.image_format import Size
from hires.data.slide_labels import match_slides
from hires.data.source import SOURCES, Source
from hires.data.sources.folder import FolderIndex, FolderSource, scan
from hires.data.splits import part_of, read_rows, read_table

_BETWEEN = re.compile("[;|]")
"""Sets the classes of an image apart."""
Cells = Mapping[str, tuple[int, Mapping[str, str]]]


@SOURCES.register("images")
class ImageSource(FolderSource):
    """Images anywhere below a folder, with the classes or numbers of a table."""

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns the images of ``data.path``, or of its part, that a table names if there is one.

        ConfigError: a line of the table names no image, or two, or lacks what it should have.
        """
        index = scan(part_of(data), data.name)
        if data.labels is None:
            return cls(index, data, size, channels)
        path = _root(data) / data.labels
        if data.targets == "class":
            table = read_table(path, "name", "label", "data.labels")
            index, keys = _named(index, data, [*table])
            classes = tuple(sorted({*table.values()}))
            labels = tuple(classes.index(table[key]) for key in keys)
            return cls(replace(index, class_names=classes, labels=labels), data, size, channels)
        cells = read_rows(path, ("name",), "data.labels")
        index, keys = _named(index, data, [*cells])
        names, rows = _rows(cells, data, path)
        source = cls(replace(index, class_names=names), data, size, channels)
        source.rows = np.array([rows[key] for key in keys], np.float64).reshape(len(keys), -1)
        return source

    @classmethod
    def files(cls, data: DataConfig) -> Sequence[str]:
        """Returns the files that it reads."""
        table = [] if data.labels is None else [str(_root(data) / data.labels)]
        return [*super().files(data), *table]


def _root(data: DataConfig) -> Path:
    return Path(data.path or "").expanduser()


def _named(
    index: FolderIndex, data: DataConfig, table: Sequence[str]
) -> tuple[FolderIndex, list[str]]:
    """Returns the images that a table names, all of one class, and what it calls each.

    It calls them by path, name, or name without suffix.
    """
    path = _root(data) / str(data.labels)
    names = {os.path.relpath(image, _root(data)): image for image in index.paths}
    keys = match_slides(table, [*names], f"data.labels={path}")
    if unknown := sorted({*table} - {*keys.values()}):
        raise ConfigError(
            f"data.labels={path} names no image below {index.root} with {listed(unknown)}; write "
            f"paths, names or names without suffix, and take out those that are not there"
        )
    paths = tuple(image for name, image in names.items() if name in keys)
    index = replace(index, paths=paths, labels=(0,) * len(paths))
    return index, [keys[name] for name in names if name in keys]


def _rows(
    cells: Cells, data: DataConfig, path: Path
) -> tuple[tuple[str, ...], dict[str, NDArray[np.float64]]]:
    """Returns the names of the classes or numbers, and those of each line, by its name."""
    key, kind = f"data.labels={path}", f"data.targets={data.targets}"
    columns = [*next(iter(cells.values()))[1]]
    others = {"name"} | ({"split"} if data.split_file == data.labels else set())
    columns = [name for name in columns if name not in others]
    if not columns:
        raise ConfigError(
            f"{key} has no column but name; {kind} needs one for each, or name,label for classes"
        )
    if data.targets == "classes" and "label" in columns:
        held = {
            name: {one for part in _BETWEEN.split(line["label"]) if (one := part.strip())}
            for name, (_, line) in cells.items()
        }
        classes = sorted(set[str]().union(*held.values()))
        if not classes:
            raise ConfigError(f"{key}: no line has a class; {kind} needs labels as cat;dog")
        return tuple(classes), {
            name: np.array([one in some for one in classes], np.float64)
            for name, some in held.items()
        }
    allowed = "0 or 1" if data.targets == "classes" else "a finite number"
    rows = {}
    for name, (number, line) in cells.items():
        rows[name] = np.array([_number(line[column]) for column in columns])
        is_wrong = ~np.isfinite(rows[name])
        if data.targets == "classes":
            is_wrong = (rows[name] != 0) & (rows[name] != 1)
        if is_wrong.any():
            column = columns[int(is_wrong.argmax())]
            raise ConfigError(
                f"{key}: line {number} has {line[column]!r} as {column}, and {kind} needs "
                f"{allowed} in each column; correct it, or take the line or the column out"
            )
    return tuple(columns), rows


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
