"""Writes the folders of labelled images of ``hires data make``.

The images are those of :mod:`hires.data.pattern`, as 8-bit TIFF files that can be read window by
window. The same arguments give the same bytes. A folder in the making holds a note of what it will
be, which becomes the manifest at the end: the next call continues an interrupted one, and half a
folder never passes for a whole one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray

from hires.core.errors import ConfigError, RunError
from hires.data import pattern
from hires.data.image_index import MANIFEST, UNFINISHED
from hires.data.image_window import Span

Progress = Callable[[int, int], None]
"""Called with the images that are there, and those of the whole folder."""


@dataclass(frozen=True)
class Textures:
    """All that determines the bytes of a folder: the content of its manifest."""

    classes: int
    """Classes, each a sub-folder."""
    count: int
    """Images of all classes together; the classes take turns."""
    height: int
    """Rows of every image."""
    width: int
    """Columns of every image."""
    seed: int
    """Decides the images."""
    channels: int = 3
    """1 (grey) or 3 (colour)."""
    tile: int = 256
    """Side of a TIFF tile, a multiple of 16; 0: strips."""
    version: int = 1
    """Of the pattern and of this manifest."""

    def __post_init__(self) -> None:
        for name, low in (("classes", 1), ("height", 1), ("width", 1), ("seed", 0), ("tile", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {low}")
        if self.count < self.classes:
            raise ConfigError(
                f"count={self.count} leaves classes without images; use at least one for each of "
                f"the {self.classes} classes"
            )
        if self.channels not in (1, 3):
            raise ConfigError(f"channels={self.channels} must be 1 (grey) or 3 (colour)")
        if self.tile % 16:
            raise ConfigError(f"tile={self.tile} must be a multiple of 16, as TIFF demands")

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W) of grey or (H, W, 3) of coloured images, as TIFF files store them."""
        colours = () if self.channels == 1 else (self.channels,)
        return (self.height, self.width, *colours)

    def path(self, index: int) -> Path:
        """Returns where an image lies in the folder."""
        name = pattern.class_name(index % self.classes, self.classes)
        return Path(name, f"{index:0{max(5, len(str(self.count - 1)))}d}.tif")


@dataclass(frozen=True)
class Made:
    """A folder that ``make_folder`` completed."""

    path: Path
    """The folder."""
    num_written: int
    """Images written now."""
    num_present: int
    """Images that were there already."""


def make_folder(
    path: str | Path,
    classes: int,
    count: int,
    size: Sequence[int],
    seed: int,
    tiled: bool = True,
    *,
    channels: int = 3,
    progress: Progress | None = None,
) -> Made:
    """Writes a folder of images whose class a network can learn, unless it is there already.

    Args:
        path: the folder, new or empty, or one that this function wrote with the same arguments.
        classes: number of classes.
        count: number of images, of all classes together.
        size: [height, width] of the images in pixels.
        seed: decides the images.
        tiled: whether the TIFF files are tiled, so that ranks read their window only.
        channels: 1 (grey) or 3 (colour).
        progress: is called after every image.

    Raises:
        ConfigError: a value makes no sense, or the folder holds something else.
        RunError: the folder cannot be written.
    """
    tile = min(256, 16 * -(-max(size) // 16)) if tiled else 0
    textures = Textures(classes, count, size[0], size[1], seed, channels, tile)
    root = Path(path).expanduser()
    try:
        return _make(root, textures, progress)
    except OSError as error:
        raise RunError(
            f"cannot write images to {root}: {error.strerror or error}; what is written stays, and "
            f"the same command goes on from there when there is room and permission to write"
        ) from error


def _make(root: Path, textures: Textures, progress: Progress | None) -> Made:
    _check_usable(root, textures)
    missing = [i for i in range(textures.count) if not (root / textures.path(i)).exists()]
    num_present = textures.count - len(missing)
    if missing or not (root / MANIFEST).exists():
        (root / MANIFEST).unlink(missing_ok=True)
        with _whole_file(root / UNFINISHED) as hidden:
            hidden.write_text(json.dumps(asdict(textures), indent=2) + "\n", encoding="utf-8")
        for done, index in enumerate(missing, start=num_present + 1):
            _write_image(root / textures.path(index), textures, index)
            if progress is not None:
                progress(done, textures.count)
        (root / UNFINISHED).replace(root / MANIFEST)
    return Made(root, len(missing), num_present)


def _check_usable(root: Path, textures: Textures) -> None:
    """Makes the folder if need be; refuses one that holds anything but (a part of) these images."""
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; give the name of a new folder")
    root.mkdir(parents=True, exist_ok=True)
    wanted = asdict(textures)
    for note in (MANIFEST, UNFINISHED):
        if (root / note).exists():
            present = _read_note(root / note)
            if present == wanted:
                return
            differing = [
                f"{k}={present.get(k)}, not {v}" for k, v in wanted.items() if present.get(k) != v
            ]
            raise ConfigError(
                f"{root} holds images made with {' and '.join(differing)}; choose another folder, "
                f"or remove this one first"
            )
    if any(root.iterdir()):
        raise ConfigError(
            f"{root} holds files that hires did not write; choose a new or an empty folder"
        )


def _read_note(path: Path) -> dict[str, Any]:
    """Returns the content of a manifest; nothing if it is no manifest."""
    try:
        note = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _write_image(path: Path, textures: Textures, index: int) -> None:
    path.parent.mkdir(exist_ok=True)
    kind: dict[str, Any] = {
        "photometric": "rgb" if textures.channels == 3 else "minisblack",
        "compression": "zlib",
        "compressionargs": {"level": 1},  # noise does not compress: do not try hard
        "metadata": None,
    }
    with _whole_file(path) as hidden:
        if textures.tile:
            kind |= {"tile": (textures.tile, textures.tile), "dtype": np.uint8}
            tifffile.imwrite(hidden, _tiles(textures, index), shape=textures.shape, **kind)
        else:
            tifffile.imwrite(hidden, _pixels(textures, index, (0, textures.height)), **kind)


def _tiles(textures: Textures, index: int) -> Iterator[NDArray[np.uint8]]:
    """Yields the tiles of an image, (tile, tile[, 3]); one row of them at a time is in memory."""
    side = textures.tile
    for top in range(0, textures.height, side):
        band = _pixels(textures, index, (top, min(top + side, textures.height)))
        for left in range(0, textures.width, side):
            part = band[:, left : left + side]
            tile = np.zeros((side, side, *part.shape[2:]), np.uint8)
            tile[: part.shape[0], : part.shape[1]] = part
            yield tile


def _pixels(textures: Textures, index: int, rows: Span) -> NDArray[np.uint8]:
    """Returns some rows of an image as 8-bit pixels, (h, W) or (h, W, 3)."""
    drawn = pattern.draw(
        index % textures.classes,
        textures.channels,
        (textures.height, textures.width),
        rows,
        (0, textures.width),
        seed=textures.seed,
        index=index,
    )
    pixels = np.rint(drawn * np.float32(255)).clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(pixels.transpose(1, 2, 0)).reshape(-1, *textures.shape[1:])


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """Gives a name, which no image has, to write to; the file is there as a whole or not at all."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield hidden
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
