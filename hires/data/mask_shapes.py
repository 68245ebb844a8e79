"""Writes a folder of images with label maps: bright shapes on a rough ground, for a first try."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hires.core.errors import ConfigError, RunError
from hires.data.sources.folder import MANIFEST

_SHAPES = 5
"""Shapes of an image."""


def make_masks(path: str | Path, classes: int, count: int, size: Sequence[int], seed: int) -> int:
    """Writes ``count`` images and their label maps; returns how many were written.

    Class 0 is the ground, all others are discs and squares of a colour each. A folder that is
    complete is left as it is.

    Raises:
        ConfigError: the folder holds something else.
        RunError: the folder cannot be written.
    """
    root = Path(path).expanduser()
    facts = {"masks": True, "classes": classes, "count": count, "size": [*size], "seed": seed}
    manifest = root / MANIFEST
    if manifest.is_file():
        if json.loads(manifest.read_text(encoding="utf-8")) == facts:
            return 0
        raise ConfigError(f"{root} holds other images; choose another folder, or remove this one")
    if root.exists() and any(root.iterdir()):
        raise ConfigError(
            f"{root} holds files that hires did not write; choose a new or an empty folder"
        )
    try:
        for folder in ("images", "masks"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels, labels = _drawn(classes, (size[0], size[1]), seed, number)
            Image.fromarray(pixels).save(root / "images" / f"{number:05d}.png")
            Image.fromarray(labels).save(root / "masks" / f"{number:05d}.png")
        manifest.write_text(json.dumps(facts), encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write images to {root}: {error.strerror or error}") from error
    return count


def _drawn(
    classes: int, size: tuple[int, int], seed: int, number: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns an image, (H, W, 3), and its label map, (H, W)."""
    random = np.random.Generator(np.random.PCG64([seed, number]))
    height, width = size
    rows, cols = np.mgrid[:height, :width]
    labels = np.zeros(size, np.uint8)
    for _ in range(_SHAPES):
        label = int(random.integers(1, classes))
        radius = max(2.0, min(size) * float(random.uniform(0.08, 0.2)))
        away = rows - random.uniform(0, height), cols - random.uniform(0, width)
        disc = away[0] ** 2 + away[1] ** 2 < radius**2
        square = np.maximum(*map(np.abs, away)) < radius
        labels[disc if label % 2 else square] = label
    hues = 2 * np.pi * np.arange(classes)[:, None] / max(1, classes - 1) + [0.0, 2.1, 4.2]
    colours = 0.5 + 0.3 * np.cos(hues)
    colours[0] = 0.35
    noisy = colours[labels] + random.normal(0, 0.12, (*size, 3))
    return (255 * noisy).clip(0, 255).astype(np.uint8), labels
