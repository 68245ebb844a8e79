"""Writes the folders of labelled images of ``hires data make``.

The images are those of ``data=textures`` as 8-bit TIFF files; the same arguments give the same
bytes. A folder in the making holds a note of what it will be, which becomes the manifest at the
end: the next call continues an interrupted one, and half a folder never passes for a whole one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray

from hires.core.errors import ConfigError, RunError
from hires.core.store.reading import Note, read_json
from hires.data.image_format import Span
from hires.data.sources import synthetic
from hires.data.sources.folder import MANIFEST, UNFINISHED


@dataclass(frozen=True)
class Textures:
    """All that determines the bytes of a folder: the content of its manifest."""

    classes: int
    """Classes, each a sub-folder."""
    count: int
    """Images of all classes together; the classes take turns."""
    height: int
    width: int
    seed: int
    channels: int = 3
    tile: int = 256
    """Side of a TIFF tile, a multiple of 16; 0: strips."""
    version: int = 1
    """Of the pattern and of this manifest."""

    def path(self, index: int) -> Path:
        """Returns where an image lies in the folder."""
        name = synthetic.class_name(index % self.classes, self.classes)
        return Path(name, f"{index:0{max(5, len(str(self.count - 1)))}d}.tif")


def make_folder(
    path: str | Path, classes: int, count: int, size: Sequence[int], seed: int, tiled: bool = True
) -> int:
    """Writes ``count`` images whose class a network can learn; returns how many were missing.

    The folder is new or empty, or one that this function wrote with the same arguments. Of tiled
    TIFF files ranks read their window only; ``size`` is [height, width].

    Raises:
        ConfigError: the folder holds something else.
        RunError: the folder cannot be written.
    """
    tile = min(256, 16 * -(-max(size) // 16)) if tiled else 0
    textures = Textures(classes, count, size[0], size[1], seed, tile=tile)
    root = Path(path).expanduser()
    try:
        _check_usable(root, asdict(textures))
        missing = [i for i in range(count) if not (root / textures.path(i)).exists()]
        if missing or not (root / MANIFEST).exists():
            (root / MANIFEST).unlink(missing_ok=True)
            with _whole_file(root / UNFINISHED) as hidden:
                hidden.write_text(json.dumps(asdict(textures), indent=2) + "\n", encoding="utf-8")
            for index in missing:
                _write_image(root / textures.path(index), textures, index)
            (root / UNFINISHED).replace(root / MANIFEST)
    except OSError as error:
        raise RunError(
            f"cannot write images to {root}: {error.strerror or error}; what is written stays, and "
            f"when there is room and permission to write, the same command writes the rest"
        ) from error
    return len(missing)


def _check_usable(root: Path, wanted: dict[str, Any]) -> None:
    """Makes the folder if need be; refuses one that holds anything but (a part of) these images."""
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; give the name of a new folder")
    root.mkdir(parents=True, exist_ok=True)
    note = next((root / n for n in (MANIFEST, UNFINISHED) if (root / n).exists()), None)
    if note is None:
        if any(root.iterdir()):
            raise ConfigError(
                f"{root} holds files that hires did not write; choose a new or an empty folder"
            )
        return
    notes: list[Note] = []
    stored = read_json(note, notes)
    if notes:
        raise ConfigError(
            f"{root} holds images, but {note.name} cannot be used ({notes[0].text}); choose "
            f"another folder, or remove this one first"
        )
    differing = [f"{k}={stored.get(k)}, not {v}" for k, v in wanted.items() if stored.get(k) != v]
    if differing:
        raise ConfigError(
            f"{root} holds images made with {' and '.join(differing)}; choose another folder, "
            f"or remove this one first"
        )


def _write_image(path: Path, textures: Textures, index: int) -> None:
    path.parent.mkdir(exist_ok=True)
    kind: dict[str, Any] = {
        "photometric": "rgb",
        "compression": "zlib",
        "compressionargs": {"level": 1},  # noise does not compress: do not try hard
        "metadata": None,
    }
    height, width, side = textures.height, textures.width, textures.tile
    with _whole_file(path) as hidden:
        if side:
            kind |= {"tile": (side, side), "shape": (height, width, 3), "dtype": np.uint8}
            tifffile.imwrite(hidden, _tiles(textures, index), **kind)
        else:
            tifffile.imwrite(hidden, _pixels(textures, index, (0, height)), **kind)


def _tiles(textures: Textures, index: int) -> Iterator[NDArray[np.uint8]]:
    """Yields the tiles of an image, (tile, tile, 3); one row of them at a time is in memory."""
    side = textures.tile
    for top in range(0, textures.height, side):
        band = _pixels(textures, index, (top, min(top + side, textures.height)))
        for left in range(0, textures.width, side):
            part = band[:, left : left + side]
            tile = np.zeros((side, side, 3), np.uint8)
            tile[: part.shape[0], : part.shape[1]] = part
            yield tile


def _pixels(textures: Textures, index: int, rows: Span) -> NDArray[np.uint8]:
    """Returns some rows of an image as 8-bit pixels, (h, W, 3)."""
    size, cols = (textures.height, textures.width), (0, textures.width)
    label = index % textures.classes
    drawn = synthetic.draw(label, 3, size, rows, cols, seed=textures.seed, index=index)
    pixels = np.rint(drawn * np.float32(255)).clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(pixels.transpose(1, 2, 0))


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """Gives a name, which no image has, to write to; the file is there as a whole or not at all."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield hidden
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
