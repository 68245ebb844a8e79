"""Decodes whole files with Pillow: PNG, JPEG, BMP, WebP and JPEG 2000.

The images that were used last stay in memory, so a small folder is decoded once; a large one stays
in a temporary file. Of 16-bit colours Pillow keeps the upper 8 bits; 16-bit grey stays as it is.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from hires.data.georeference import Georeference, pixel_size
from hires.data.image_format import (
    FORMATS,
    ORIENTATION,
    ImageError,
    ImageFacts,
    Pixels,
    Size,
    Span,
    check_claim,
)

CACHE_BYTES = 64 * 2**20
"""Bytes of all decoded images that a process keeps."""

PILLOW_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "JPEG2000")
"""Formats that Pillow may read."""
CONVERTED = {"1": "L", "PA": "RGBA", "CMYK": "RGB"}
"""Modes of Pillow that are converted first, and to which."""
_SAMPLE_BITS = {"I": 32, "I;16": 16}
"""Of modes whose samples have more than 8 bits."""
_NAMES = {
    "1": "grey", "L": "grey", "I": "grey", "LA": "grey+alpha", "P": "palette",
    "PA": "palette+alpha", "RGBA": "RGB+alpha",
}  # fmt: skip
"""Mode of Pillow -> its colours in words, where they are called otherwise."""
_ENDS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9"}
"""Last bytes of a complete file; zeros and line ends may follow."""
_NO_DPI = (72, 72)
"""What Pillow, and many a camera, says of an image whose pixels have no size."""
COLOURS = {"L": 1, "LA": 1, "RGB": 3, "RGBA": 3}


@dataclass
class WholeImage:
    """A file that is decoded as a whole when its first window is read."""

    path: Path
    size: Size
    colours: int
    peak: float
    facts: ImageFacts

    def check_complete(self) -> None:
        """Raises an error if the file is cut off; only one that looks so is decoded."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - 1024))
            tail = file.read().rstrip(b"\0\r\n ")
        if not tail.endswith(_ENDS.get(self.facts.format, b"?")):
            pixels_of(self.path)

    def read(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of the image, (h, w, samples)."""
        return pixels_of(self.path)[slice(*rows), slice(*cols)]

    def close(self) -> None:
        """Does nothing: the file is closed already."""


_kept: OrderedDict[tuple[Path, int, int, bool], Pixels] = OrderedDict()
_lock = threading.Lock()  # loaders read in threads of their own


@FORMATS.register(".jp2")
@FORMATS.register(".webp")
@FORMATS.register(".bmp")
@FORMATS.register(".jpeg")
@FORMATS.register(".jpg")
@FORMATS.register(".png")
def open_whole(path: Path, max_pixels: int) -> WholeImage:
    """Returns the image of a file, of which only the header was read."""
    with opened(path) as image:
        width, height = image.size
        mode = _mode_of(image)
        bits = _SAMPLE_BITS.get(image.mode, 8) * len(image.getbands())
        check_claim((height, width), bits, max_pixels)
        facts = _facts_of(image, path)
    if mode.startswith("I"):  # 16-bit grey, which older versions of Pillow call "I"
        return WholeImage(path, (height, width), 1, 65535.0, facts)
    if mode not in COLOURS:
        raise ImageError(f"its pixels are of Pillow's mode {mode}; convert it to RGB or grey")
    return WholeImage(path, (height, width), COLOURS[mode], 255.0, facts)


def _facts_of(image: Image.Image, path: Path) -> ImageFacts:
    """Returns what the header says; of PNG Pillow hides how many bits there are."""
    bits = 16 if image.mode.startswith("I") else 8
    if image.format == "PNG":
        with path.open("rb") as file:
            bits = file.read(25)[24]  # after signature, length, IHDR, width and height
    tagged = "exif" in image.info  # else Pillow decodes a PNG for it
    rotated = tagged and image.getexif().get(ORIENTATION, 1) not in (0, 1)
    colours = _NAMES.get(image.mode.partition(";")[0], image.mode)
    lossy = "" if image.format in ("PNG", "BMP") else str(image.format)
    others = getattr(image, "n_frames", 1) - 1 if image.format in ("PNG", "WEBP") else 0
    # Pillow has several samples as 4 bytes a pixel; they are written into pieces, then into one.
    mode, pixels = _mode_of(image), image.width * image.height
    kept = pixels * Image.getmodebands(mode) * (2 if mode.startswith("I") else 1)
    stored = pixels * sum(1 if one in ("1", "L", "P") else 4 for one in {mode, image.mode})
    across, down = image.info.get("dpi", _NO_DPI)
    is_known = (across, down) != _NO_DPI and min(across, down) > 0
    pixel = pixel_size(1 / down, 1 / across, "inch") if is_known else None
    return ImageFacts(
        str(image.format), colours, bits, rotated, image.height, lossy, unread_pages=others,
        decoding_bytes=stored + 2 * kept, kept_bytes=kept, reference=Georeference(pixel),
    )  # fmt: skip


def pixels_of(path: Path, as_stored: bool = False) -> Pixels:
    """Returns the pixels of a file, (H, W, samples); one that has changed is decoded again.

    ``as_stored``: of a palette its numbers, not its colours. At most ``CACHE_BYTES`` are kept.
    """
    stat = path.stat()
    key = (path, stat.st_mtime_ns, stat.st_size, as_stored)
    pixels = _kept.get(key)
    if pixels is None:
        with opened(path) as image:
            image.load()
            if image.format == "PNG":
                _check_rows(image, path)
            if not as_stored:
                _check_palette(image)
            mode = image.mode if as_stored else _mode_of(image)
            pixels = np.asarray(image if mode == image.mode else image.convert(mode))
        pixels = pixels.astype(np.uint16) if not as_stored and mode.startswith("I") else pixels
        pixels = pixels.reshape(*pixels.shape[:2], -1)
    if pixels.nbytes > CACHE_BYTES:  # it is read in many parts, and decoded once
        pixels = _on_disk(pixels)
    with _lock:
        _kept[key] = pixels
        _kept.move_to_end(key)
        while len(_kept) > 1 and sum(kept.nbytes for kept in _kept.values()) > CACHE_BYTES:
            _kept.popitem(last=False)
    return pixels


def _on_disk(pixels: Pixels) -> Pixels:
    """Returns the same pixels in a temporary file, whose pages the system may drop from memory."""
    with tempfile.TemporaryFile(prefix="hires-") as file:  # which has no name: nothing is left
        pixels.tofile(file)
        return np.memmap(file, pixels.dtype, "r", shape=pixels.shape)


def _check_rows(image: Image.Image, path: Path) -> None:
    """Raises a ValueError where a PNG lacks rows, which Pillow leaves black."""
    # So only a last row of zeros is worth a second reading; an interlaced file has others first.
    is_sure = not image.info.get("interlace") and np.asarray(image)[-1].any()
    if not is_sure and (missing := _missing_bytes(path)):
        raise ValueError(f"its pixels are cut off, {missing} bytes short")


def _check_palette(image: Image.Image) -> None:
    """Raises a ValueError where pixels have colours that the palette lacks."""
    entries = 0 if image.palette is None else len(image.palette.palette) // 3
    if image.mode == "P" and (most := int(np.asarray(image).max())) >= entries:
        raise ValueError(f"its pixels have colour {most} of a palette of {entries}")


def _missing_bytes(path: Path) -> int:
    """Returns how many bytes of its pixels a PNG lacks."""
    with path.open("rb") as file:
        file.seek(16)  # behind the signature, and length and name of the first chunk
        width, height, bits, colours, _, _, passes = struct.unpack(">IIBBBBB", file.read(13))
        file.seek(4, os.SEEK_CUR)  # its check sum
        bits *= {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colours]  # of a pixel
        # A row is a byte that names its filter, and its pixels.
        parts = _ADAM7 if passes else ((0, 0, 1, 1),)
        sizes = [(-(-(height - y) // dy), -(-(width - x) // dx)) for x, y, dx, dy in parts]
        missing: int = sum(h * (1 + -(-w * bits // 8)) for h, w in sizes if h > 0 and w > 0)
        inflate = zlib.decompressobj()
        while missing and (head := file.read(8)):
            length, name = struct.unpack(">I4s", head)
            body = file.read(length + 4)[:length]
            if name == b"IDAT":
                missing -= len(inflate.decompress(body, missing))
    return missing


_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
          (0, 1, 1, 2))  # fmt: skip
"""First column and row, and the steps, of the passes of an interlaced PNG (its section 8.2)."""


def _mode_of(image: Image.Image) -> str:
    """Returns the mode of Pillow in which an image is used."""
    palette = "RGBA" if "transparency" in image.info else "RGB"
    return {**CONVERTED, "P": palette}.get(image.mode, image.mode)


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Yields the first image of a file; raises whatever Pillow raises when it is broken.

    Pillow's own limit on pixels is a warning, and is lifted: ``data.max_pixels`` takes its place.
    """
    with _lock:  # the limit is of the whole process
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            opened = Image.open(path, formats=PILLOW_FORMATS)
        except UnidentifiedImageError as error:
            raise ValueError(f"it is no {', '.join(PILLOW_FORMATS)} image") from error
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    with opened:
        yield opened
