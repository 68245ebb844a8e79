"""Divides a data set into images to train with and images for validation.

    data.path/train, data.path/val        the folder's own division, and that of CIFAR-10's files
    all other data                        a share of every class, drawn from data.split_seed

Every run that names the same data divides it alike, whatever its layout or ``seed``.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.store.file_names import entries_of, is_dir, is_file

CIFAR10_FOLDER = "cifar-10-batches-bin"
"""Of its archive."""
TRAIN, VALIDATION = ("train",), ("val", "validation", "valid")
"""Names of a folder's own parts; of several the first counts."""


def cifar10_files(data: DataConfig) -> list[Path]:
    """Returns the files of CIFAR-10 that hold the images of ``data.split``; ConfigError: none."""
    root = Path(data.path or "").expanduser()
    if data.path and not any(root.glob("*_batch*.bin")):
        root /= CIFAR10_FOLDER
    train, held = sorted(root.glob("data_batch_*.bin")), root / "test_batch.bin"
    files = {"train": train, "validation": [held]}.get(data.split, [*train, held])
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
    parts = {} if data.split == "all" else _own_parts(data.path)
    if parts and data.name == "folder":
        _require_same_classes(*parts.values())
    return str(parts[data.split]) if parts else data.path


def chosen(data: DataConfig, labels: Iterable[int]) -> list[int] | None:
    """Returns the images of ``data.split`` by their numbers, given the labels of all; None: all.

    ConfigError: there is none.
    """
    if data.split == "all" or data.name == "cifar10" or _own_parts(data.path):
        return None
    by_class: dict[int, list[int]] = collections.defaultdict(list)
    for number, label in enumerate(labels):
        by_class[label].append(number)
    kept: list[int] = []
    for label, numbers in by_class.items():
        order = np.random.Generator(np.random.PCG64([data.split_seed, label]))
        drawn = order.permutation(len(numbers)).tolist()
        # A class of several images has some of them in either part.
        count = min(max(1, int(len(numbers) * data.validation + 0.5)), len(numbers) - 1)
        part = drawn[:count] if data.split == "validation" else drawn[count:]
        kept += [numbers[place] for place in part]
    if not kept:
        raise ConfigError(
            f"data.split={data.split}: no class has two images to divide; use data.split=all"
        )
    return sorted(kept)


def _own_parts(path: str | None) -> dict[str, Path]:
    root, parts = Path(path or os.devnull).expanduser(), dict[str, Path]()
    for split, names in (("train", TRAIN), ("validation", VALIDATION)):
        there = [name for name in names if is_dir(root / name)]
        if there:
            parts[split] = root / there[0]
    return parts if len(parts) == 2 else {}


def _require_same_classes(*parts: Path) -> None:
    """Refuses parts in which a class would have two labels."""
    held = [{entry.name for entry in entries_of(part) if entry.is_dir()} for part in parts]
    if differing := sorted(held[0] ^ held[1]):
        where = parts[0] if differing[0] in held[0] else parts[1]
        raise ConfigError(
            f"data.path={parts[0].parent}: only {where.name} has the class {differing[0]!r}, so "
            f"labels would differ from those of the other part; give both the same sub-folders"
        )
