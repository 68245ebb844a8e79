"""Writes slides for a first try: pyramids of tissue on glass, with outlines and a table of classes.

slides/000.tif ...              three levels, in tiles
annotations/000.geojson ...     outlines of the tissue, with its class
labels.csv                      slide,label
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tifffile import TiffWriter

from hires.core.errors import ConfigError, RunError
from hires.data.sources.folder import MANIFEST

_BLOBS, _CORNERS = 3, 24
_GLASS = (243, 242, 244)
_BAND = 256
_LEVELS = 3
_TILE = 256


def make_slides(path: str | Path, classes: int, count: int, size: Sequence[int], seed: int) -> int:
    """Writes ``count`` slides of a ``size``, (height, width); returns how many were written.

    A folder that is complete is left as it is.

    Raises:
        ConfigError: the folder holds something else.
        RunError: the folder cannot be written.
    """
    root = Path(path).expanduser()
    facts = {"slides": True, "classes": classes, "count": count, "size": [*size], "seed": seed}
    manifest = root / MANIFEST
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")) == facts:
        return 0
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root} holds other files; choose a new or an empty folder")
    try:
        for folder in ("slides", "annotations"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        with (root / "labels.csv").open("w", encoding="utf-8", newline="") as table:
            rows = csv.writer(table)
            rows.writerow(["slide", "label"])
            for number in range(count):
                label = number % classes
                pixels, outlines = _drawn(label, classes, (size[0], size[1]), seed, number)
                _write(root / "slides" / f"{number:03d}.tif", pixels)
                held = json.dumps(_features(outlines, f"class{label}"))
                (root / "annotations" / f"{number:03d}.geojson").write_text(held, encoding="utf-8")
                rows.writerow([f"{number:03d}.tif", f"class{label}"])
        manifest.write_text(json.dumps(facts), encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write slides to {root}: {error.strerror or error}") from error
    return count


def _write(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Writes a pyramid, each level half as large as that before, below the finest one."""
    options: dict[str, Any] = {
        "tile": (_TILE, _TILE), "photometric": "rgb", "compression": "zlib", "metadata": None,
    }  # fmt: skip
    with TiffWriter(path) as file:
        file.write(pixels, subifds=_LEVELS - 1, **options)
        for _ in range(_LEVELS - 1):
            height, width = (length // 2 * 2 for length in pixels.shape[:2])
            quads = pixels[:height, :width].reshape(height // 2, 2, width // 2, 2, 3)
            sums = quads.sum((1, 3), dtype=np.uint16)
            pixels = ((sums + 2) // 4).astype(np.uint8)
            file.write(pixels, subfiletype=1, **options)


def _drawn(
    label: int, classes: int, size: tuple[int, int], seed: int, number: int
) -> tuple[NDArray[np.uint8], list[list[tuple[float, float]]]]:
    """Returns a slide, (H, W, 3), and the outlines of its tissue, (column, row)."""
    from PIL import Image, ImageDraw

    random = np.random.Generator(np.random.PCG64([seed, 0x51, number]))
    height, width = size
    drawn = Image.new("1", (width, height))
    outlines = []
    for _ in range(_BLOBS):
        middle = random.uniform(0.25, 0.75, 2) * [width, height]
        radius = min(size) * random.uniform(0.15, 0.28) * random.uniform(0.8, 1.2, _CORNERS)
        turn = np.arange(_CORNERS) / _CORNERS * 2 * np.pi
        corners = np.stack([np.cos(turn), np.sin(turn)], 1) * radius[:, None] + middle
        outlines.append([(float(x), float(y)) for x, y in corners.clip(0, [width, height])])
        ImageDraw.Draw(drawn).polygon(outlines[-1], fill=1)
    hue = 2 * np.pi * label / max(2, classes)
    tissue = 170 + 55 * np.cos(hue + np.array([0.0, 2.1, 4.2]))
    inside, made = np.asarray(drawn)[:, :, None], np.empty((height, width, 3), np.uint8)
    for top in range(0, height, _BAND):  # numbers take 32 times the room of the pixels
        rows = slice(top, min(top + _BAND, height))
        shape = (rows.stop - top, width)
        rough = random.normal(0, 14, (*shape, 1)) + random.normal(0, 5, (*shape, 3))
        pixels = np.where(inside[rows], tissue + rough, np.array(_GLASS) + rough / 8)
        made[rows] = pixels.clip(0, 255).astype(np.uint8)
    return made, outlines


def _features(outlines: list[list[tuple[float, float]]], label: str) -> dict[str, Any]:
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[*outline, outline[0]]]},
            "properties": {"objectType": "annotation", "classification": {"name": label}},
        }
        for outline in outlines
    ]
    return {"type": "FeatureCollection", "features": features}
