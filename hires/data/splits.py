"""Divides a data set into images to train with and images for validation.

    data.split_file                       a list of names
    data.path/train, val and test         the folder's own division, and that of CIFAR-10's files
    all other data                        a share of every class, drawn from data.split_seed

Every run that names the same data divides it alike, whatever its layout or ``seed``.
"""

from __future__ import annotations

import collections
import csv
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.store.file_names import entries_of, is_dir, is_file
from hires.core.store.reading import read_named
from hires.data.source import Source

CIFAR10_FOLDER = "cifar-10-batches-bin"
"""Of its archive."""
MOST_BYTES = 2**28
"""Of a file that says something about images."""
PARTS = {"train": ("train",), "validation": ("val", "validation", "valid"), "test": ("test",)}
"""``data.split`` -> names of a folder's own parts; of several the first counts."""


def cifar10_files(data: DataConfig) -> list[Path]:
    """Returns the files of CIFAR-10 that hold the images of ``data.split``; ConfigError: none."""
    root = Path(data.path or "").expanduser()
    if data.path and not any(root.glob("*_batch*.bin")):
        root /= CIFAR10_FOLDER
    train, held = sorted(root.glob("data_batch_*.bin")), root / "test_batch.bin"
    parts = {"train": train, "validation": [held], "test": [held]}
    files = parts.get(data.split, [*train, held])
    missing = [file for file in files if not is_file(file)]
    if not train:
        missing = [root / "data_batch_1.bin"]
    if missing:
        raise ConfigError(
            f"data=cifar10 needs data.path=FOLDER with data_batch_1.bin to data_batch_5.bin and "
            f"test_batch.bin, the binary version of CIFAR-10, and {missing[0]} is not there"
        )
    return files


def part_of(data: DataConfig) -> str | None:
    """Returns the folder in which the images of ``data.split`` lie: ``data.path`` or a part."""
    parts = {} if data.split == "all" or data.split_file else own_parts(data.path)
    if parts and data.split not in parts:
        raise ConfigError(
            f"data.split=test: data.path={data.path} has train and val, but no folder test; add it"
        )
    if parts and data.name == "folder":
        require_same_classes(*parts.values())
    return str(parts[data.split]) if parts else data.path


def chosen(data: DataConfig, whole: Source) -> list[int] | None:
    """Returns the images of ``data.split`` by their numbers; None: all.

    ConfigError: there is none.
    """
    if data.split == "all" or data.name == "cifar10":
        return None
    if data.split_file is not None:
        return _listed(data, whole)
    if own_parts(data.path):
        return None
    if data.split == "test" and data.test == 0:
        raise ConfigError(
            "data.split=test: no images are set apart for it; use data.test=SHARE, a folder test "
            "beside train and val, or data.split_file"
        )
    by_class: dict[int, list[int]] = collections.defaultdict(list)
    for number in range(len(whole)):
        by_class[whole.label(number)].append(number)
    kept: list[int] = []
    for label, numbers in by_class.items():
        order = np.random.Generator(np.random.PCG64([data.split_seed, label]))
        drawn = order.permutation(len(numbers)).tolist()
        # A class of several images has some of them in either part.
        count = min(max(1, int(len(numbers) * data.validation + 0.5)), len(numbers) - 1)
        last = min(count + int(len(numbers) * data.test + 0.5), len(numbers) - 1)
        parts = {"validation": (0, count), "test": (count, last), "train": (last, len(numbers))}
        first, end = parts[data.split]
        kept += [numbers[place] for place in drawn[first:end]]
    if not kept:
        raise ConfigError(
            f"data.split={data.split}: no class has two images to divide; use data.split=all"
        )
    return sorted(kept)


def file_of_split(data: DataConfig) -> Path | None:
    """Returns the file that lists the images of each part."""
    if data.split_file is None:
        return None
    root = Path(data.path or os.devnull).expanduser()
    return (root if is_dir(root) else root.parent) / data.split_file


def _listed(data: DataConfig, whole: Source) -> list[int]:
    """Returns the images that ``data.split_file`` lists for ``data.split``."""
    path = file_of_split(data)
    assert path is not None
    table = read_table(path, "name", "split", "data.split_file")
    if wrong := sorted({*table.values()} - {*PARTS}):
        raise ConfigError(
            f"data.split_file={data.split_file}: {wrong[0]!r} is no part; use {', '.join(PARTS)}"
        )
    numbers = {whole.name(number): number for number in range(len(whole))}
    if missing := [name for name in table if name not in numbers]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"data.split_file={data.split_file}: {missing[0]!r}{more} is none of the data's "
            f"images, as {next(iter(numbers), 'none')!r}"
        )
    kept = [numbers[name] for name, part in table.items() if part == data.split]
    if not kept:
        raise ConfigError(
            f"data.split_file={data.split_file} lists no image for data.split={data.split}"
        )
    return sorted(kept)


def own_parts(path: str | None) -> dict[str, Path]:
    """Returns the sub-folders that are parts of the data by ``data.split``; none: it has none."""
    root, parts = Path(path or os.devnull).expanduser(), dict[str, Path]()
    for split, names in PARTS.items():
        there = [name for name in names if is_dir(root / name)]
        if there:
            parts[split] = root / there[0]
    return parts if {"train", "validation"} <= parts.keys() else {}


def require_same_classes(*parts: Path) -> None:
    """Refuses parts in which a class would have two labels, with a ConfigError."""
    held = [{entry.name for entry in entries_of(part) if entry.is_dir()} for part in parts]
    for part, own in zip(parts, held, strict=True):
        if differing := sorted(held[0] ^ own):
            where = parts[0] if differing[0] in held[0] else part
            raise ConfigError(
                f"data.path={parts[0].parent}: only {where.name} has the class {differing[0]!r}, "
                f"so labels would differ from those of the other part; give both the same "
                f"sub-folders"
            )


def read_table(path: Path, first: str, second: str, key: str) -> dict[str, str]:
    """Returns a column of a CSV file by another; ConfigError, which names the ``key``: it has none.

    Files of other columns, and two lines of one name, are refused.
    """
    found = read_rows(path, (first, second), key)
    for number, row in found.values():
        if not row[second]:
            raise ConfigError(f"{key}={path}: line {number} lacks its {first} or {second}")
    return {name: row[second] for name, (_, row) in found.items()}


def read_rows(
    path: Path, columns: Sequence[str], key: str
) -> dict[str, tuple[int, dict[str, str]]]:
    """Returns the lines of a CSV file, their numbers and cells, by their first column.

    ConfigError, which names the ``key``: it cannot be read, lacks one of the ``columns``, a line
    lacks its name, or two of one name differ.
    """
    first = columns[0]
    try:
        text = read_named(path, MOST_BYTES)
        rows = csv.DictReader(text.lstrip("\ufeff").splitlines())
        names, lines = rows.fieldnames or [], [(rows.line_num, row) for row in rows]
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{key}={path} cannot be read: {reason}; give a CSV file whose first line "
            f"names {','.join(columns)}"
        ) from None
    if not {*columns} <= {*names}:
        raise ConfigError(
            f"{key}={path} has the columns {', '.join(names) or 'none'}; its first line must name "
            f"{','.join(columns)}"
        )
    if again := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{key}={path} has two columns {again[0]!r}; give each its own name")
    if not lines:
        raise ConfigError(
            f"{key}={path} has no lines below its first ({','.join(names)}); add one for each name"
        )
    found: dict[str, tuple[int, dict[str, str]]] = {}
    for number, row in lines:
        cells = {name: (row[name] or "").strip() for name in names}
        if not cells[first]:
            raise ConfigError(f"{key}={path}: line {number} lacks its {' or '.join(columns)}")
        _, other = found.setdefault(cells[first], (number, cells))
        for name in columns[1:] or names:
            if other[name] != cells[name]:
                raise ConfigError(
                    f"{key}={path}: {cells[first]} is {other[name]} and, later, {cells[name]}"
                )
    return found
