"""Decodes whole files with Pillow: PNG, JPEG, and TIFF whose compression tifffile lacks.

The images that were used last stay in memory, so a small folder is decoded once. Of 16-bit colours
Pillow keeps the upper 8 bits; 16-bit grey stays as it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from hires.data.image_format import FORMATS, ImageError, Pixels, Size, Span

CACHE_BYTES = 64 * 2**20
"""Bytes of all decoded images that a process keeps."""

PILLOW_FORMATS = ("PNG", "JPEG", "TIFF")
"""Formats that Pillow may read."""
CONVERTED = {"1": "L", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB"}
"""Modes of Pillow that are converted first, and to which."""
COLOURS = {"L": 1, "LA": 1, "RGB": 3, "RGBA": 3, "RGBX": 3}


@dataclass
class WholeImage:
    """A decoded image, (H, W, samples)."""

    pixels: Pixels
    colours: int
    peak: float

    def __post_init__(self) -> None:
        self.size: Size = (self.pixels.shape[0], self.pixels.shape[1])

    def read(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of the image, (h, w, samples)."""
        return self.pixels[slice(*rows), slice(*cols)]

    def close(self) -> None:
        """Does nothing: the file is closed already."""


_kept: OrderedDict[tuple[Path, int, int], WholeImage] = OrderedDict()
_lock = threading.Lock()  # loaders read in threads of their own


@FORMATS.register(".jpeg")
@FORMATS.register(".jpg")
@FORMATS.register(".png")
def open_whole(path: Path) -> WholeImage:
    """Returns the image of a file; one that has changed is decoded again."""
    stat = path.stat()
    key = (path, stat.st_mtime_ns, stat.st_size)
    image = _kept.get(key) or decode(path)
    with _lock:
        _kept[key] = image
        _kept.move_to_end(key)
        while sum(kept.pixels.nbytes for kept in _kept.values()) > CACHE_BYTES:
            _kept.popitem(last=False)
    return image


def decode(path: Path) -> WholeImage:
    """Returns the first image of a file; raises whatever Pillow raises when it is broken."""
    try:
        with _any_number_of_pixels(), Image.open(path, formats=PILLOW_FORMATS) as opened:
            opened.load()
            palette = "RGBA" if "transparency" in opened.info else "RGB"
            mode = {**CONVERTED, "P": palette}.get(opened.mode)
            image = opened.convert(mode) if mode else opened
            pixels = np.asarray(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is no {', '.join(PILLOW_FORMATS)} image") from error
    if image.mode.startswith("I"):  # 16-bit grey, which older versions of Pillow call "I"
        return WholeImage(pixels.astype(np.uint16)[:, :, None], 1, 65535.0)
    if image.mode not in COLOURS:
        raise ImageError(f"its pixels are of Pillow's mode {image.mode}; convert it to RGB or grey")
    return WholeImage(pixels.reshape(*pixels.shape[:2], -1), COLOURS[image.mode], 255.0)


@contextmanager
def _any_number_of_pixels() -> Iterator[None]:
    """Lifts Pillow's limit on pixels, which protects servers from uploads, while a file is read."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit
