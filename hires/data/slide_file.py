"""Opens slides: images at several levels of detail, of which any window of any level can be read.

    level 0   40,000 x 60,000     read by tifffile (TIFF, OME-TIFF) or openslide (.svs, .ndpi,
    level 1   10,000 x 15,000     .mrxs and others: extra slides)
    level 2    2,500 x  3,750

What openslide returns for a window may depend on where it begins, where a level is not a whole
number of times coarser. So its pixels are always taken in the same blocks, and a window of a slide
is bit for bit a part of the whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hires.core.programs import adding
from hires.data.georeference import Georeference, pixel_size
from hires.data.image_format import (
    MAX_SIDE,
    ImageError,
    ImageFacts,
    ImageFile,
    Pixels,
    Size,
    Span,
    suffix_of,
)

TIFF = (".tif", ".tiff")
OPENSLIDE = (
    ".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi",
)  # fmt: skip
SUFFIXES = (*TIFF, *OPENSLIDE)
"""Of files that are slides."""
_BLOCK = 512
"""Pixels on a side of what openslide reads at once."""
_MOST_OPEN = 4
"""Levels that a thread keeps open."""

_open = threading.local()


def levels_of(path: Path, max_pixels: int) -> list[Size]:
    """Returns height and width of each level, the finest first; errors are of the decoders."""
    with closing(_opened(path, 0, max_pixels)) as image:
        levels: list[Size] = image.levels
    if max(levels[0]) > MAX_SIDE:
        raise ImageError(f"its sides are {levels[0]} pixels, and one may have {MAX_SIDE}")
    return levels


def slide_level(path: Path, level: int, max_pixels: int) -> ImageFile:
    """Returns a level of a slide, which stays open for the next call of this thread."""
    held: OrderedDict[Any, ImageFile] = _open.__dict__.setdefault("held", OrderedDict())
    stat = path.stat()
    key = (str(path), stat.st_mtime_ns, stat.st_size, level, max_pixels)
    if key not in held:
        held[key] = _opened(path, level, max_pixels)
        if len(held) > _MOST_OPEN:
            _, oldest = held.popitem(last=False)
            oldest.close()
    held.move_to_end(key)
    return held[key]


def _opened(path: Path, level: int, max_pixels: int) -> Any:
    """Opens a level of a slide; an ImageError says what is missing."""
    if suffix_of(path.name) not in TIFF:
        return OpenSlideLevel(path, level)
    # Imported here: a machine that checks its GPU with torch alone has no tifffile.
    from hires.data.formats.tiff import TiffImage

    try:
        return TiffImage(path, max_pixels, level)
    except ImageError:  # it may have the codec that tifffile lacks
        with suppress(ImageError):
            return OpenSlideLevel(path, level)
        raise


class OpenSlideLevel:
    """One level of a slide that openslide reads, as RGB of 8 bits."""

    colours, peak = 3, 255.0

    def __init__(self, path: Path, level: int) -> None:
        openslide = _library()
        try:
            self._slide = openslide.OpenSlide(path)
        except openslide.OpenSlideError as error:
            raise ImageError(f"openslide cannot open it: {error}") from error
        self._level = level
        self.levels: list[Size] = [(rows, cols) for cols, rows in self._slide.level_dimensions]
        self.size = self.levels[level]
        self._factor = float(self._slide.level_downsamples[level])

    @property
    def facts(self) -> ImageFacts:
        """What is known of it."""
        known, each = self._slide.properties, self._factor
        maker = str(known.get("openslide.vendor", "slide"))
        pixel = pixel_size(known.get("openslide.mpp-y"), known.get("openslide.mpp-x"), "um")
        reference = Georeference(pixel).part((0, 0), (each, each))
        return ImageFacts(maker, "RGB", 8, False, _BLOCK, reference=reference)

    def close(self) -> None:
        """Closes the slide."""
        self._slide.close()

    def check_complete(self) -> None:
        """Does nothing: openslide finds what is cut off when it reads it."""

    def read(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of the level, (h, w, 3); where the scanner has seen nothing, white."""
        made = np.empty((rows[1] - rows[0], cols[1] - cols[0], 3), np.uint8)
        for top in range(rows[0] // _BLOCK * _BLOCK, rows[1], _BLOCK):
            for left in range(cols[0] // _BLOCK * _BLOCK, cols[1], _BLOCK):
                block = self._block(top, left)
                r, c = max(top, rows[0]), max(left, cols[0])
                to = made[r - rows[0] :, c - cols[0] :][: top + len(block) - r]
                to = to[:, : left + block.shape[1] - c]
                to[:] = block[r - top :, c - left :][: to.shape[0], : to.shape[1]]
        return made

    def _block(self, top: int, left: int) -> Pixels:
        height, width = min(_BLOCK, self.size[0] - top), min(_BLOCK, self.size[1] - left)
        place = (round(left * self._factor), round(top * self._factor))
        try:
            read = np.asarray(self._slide.read_region(place, self._level, (width, height)))
        except _library().OpenSlideError as error:
            raise ImageError(f"openslide cannot read it: {error}") from error
        # Its colours are not multiplied by alpha.
        alpha = read[:, :, 3:].astype(np.uint16)
        seen = (read[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255
        return np.asarray(seen, np.uint8)


def _library() -> Any:
    try:
        import openslide
    except ImportError as error:
        raise ImageError(
            f"slides of this kind are read by openslide ({error}); {adding('slides')}"
        ) from error
    return openslide
