"""Defines windows of images, and registers the formats of image files.

A format is a module of :mod:`hires.data.formats` that registers the function which opens a file
under its suffixes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hires.core.registry import Registry
from hires.data.georeference import Georeference

Span = tuple[int, int]
"""``[start, stop)`` in pixels."""

Size = tuple[int, int]
"""(height, width) in pixels."""

Pixels = NDArray[Any]
"""(h, w, samples): values as they were stored, of any unsigned or floating type."""

Window = NDArray[np.float32]
"""(C, h, w): values as the network takes them, C-contiguous."""


ORIENTATION = 274
"""Tag of EXIF and TIFF; 1, or 0 by mistake: the first row is the top."""
MAX_PIXELS = 2**28
"""Default of ``data.max_pixels``: 16384 x 16384, which take at most 1 GiB as they are stored."""
MAX_SIDE = 2**20
"""Pixels: what ``data.fit=resize`` computes for each row and column of an image is held at once."""
LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue (ITU-R BT.601), as Pillow uses them."""
_PIXEL_BITS = 32
"""A pixel of more bits counts as several, so that the bound on pixels is one on bytes, too."""


class ImageError(ValueError):
    """An image has no defined treatment; the message says what would work."""


@dataclass(frozen=True)
class ImageFacts:
    """What the header of a file says of its first image."""

    format: str
    """As ``PNG``."""
    colours: str
    """As ``RGB``, ``grey+alpha``, ``CMYK`` or ``palette``; ``grey+3`` has three more samples."""
    bits: int
    """Of a sample as it is stored."""
    is_rotated: bool
    """Whether it asks to be shown rotated or mirrored (EXIF orientation), which no run does."""
    band: int
    """Rows that are decoded together."""
    lossy: str = ""
    """The compression, unless it keeps every pixel, as ``JPEG``."""
    is_float: bool = False
    """Whether its samples are floats."""
    unread_pages: int = 0
    """Pages that are as large as the image and no part of it, as other slices of a volume."""
    decoding_bytes: int = 0
    """Memory that is taken to read a window, beside the window."""
    kept_bytes: int = 0
    """Memory in which its pixels stay for the next window."""
    reference: Georeference = field(default_factory=Georeference)
    """Where its pixels lie."""


class ImageFile(Protocol):
    """An open file, which gives any window of its first image as it is stored."""

    size: Size
    colours: int
    """Samples but alpha, which come first: 1 of grey, 3 of colour, more of bands and channels."""
    peak: float
    """The value of white."""

    @property
    def facts(self) -> ImageFacts:
        """What the header says."""
        ...

    def read(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of the image, (h, w, samples), colours first."""
        ...

    def check_complete(self) -> None:
        """Raises an error if the file is cut off; it is cheap for a file that is not."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


FORMATS: Registry[Callable[[Path, int], ImageFile]] = Registry("image format")
"""Suffix in lower case -> opener of a path, which decodes no pixel and checks what the header
claims by :func:`check_claim`. It raises an ImageError or whatever its decoder raises."""


def suffix_of(name: str) -> str:
    """Returns the suffix that FORMATS may have, as ``.tif``; none of a name without a stem."""
    stem, dot, suffix = name.rpartition(".")
    return dot + suffix.lower() if stem else ""


def open_image(path: Path, max_pixels: int = MAX_PIXELS) -> ImageFile:
    """Opens a file of a registered format; a broken one raises whatever its decoder raises.

    No pixel is decoded. More than ``max_pixels`` are never decoded at once: an ImageError.
    """
    stat = path.stat()
    if not S_ISREG(stat.st_mode):  # to open a pipe would wait for its writer
        raise ValueError("it is no plain file")
    if stat.st_size == 0:
        raise ValueError("the file is empty")
    image = FORMATS[suffix_of(path.name)](path, max_pixels)
    if max(image.size) > MAX_SIDE:
        image.close()
        raise ImageError(f"{_claim(image.size)}, and a side may have {MAX_SIDE}; cut it into parts")
    return image


def check_claim(size: Size, bits: int, max_pixels: int, part: str = "") -> None:
    """Refuses what a header claims before it is decoded, if that is too much for the memory.

    A few kilobytes may decode to gigabytes, so the size of the file says nothing.

    Args:
        size: what is decoded at once.
        bits: of one pixel, all samples together.
        max_pixels: ``data.max_pixels``.
        part: what it is a part of the image, as ``in a strip``.
    """
    pixels = size[0] * size[1] * -(-bits // _PIXEL_BITS)
    if pixels > max_pixels:
        raise ImageError(
            f"{_claim(size, part)} of {bits} bits, more than data.max_pixels={max_pixels} that are "
            f"decoded at once; if that is right and the memory suffices, use "
            f"data.max_pixels={pixels}"
        )


def _claim(size: Size, part: str = "") -> str:
    return f"its header claims {size[0]} x {size[1]} pixels{part and f' {part}'}"


def normalised(pixels: Pixels, peak: float, channels: int) -> Window:
    """Returns pixels as the network takes them: (value / peak - 0.5) / 0.25, from -2 to 2.

    One sample is given to all channels; ``peak`` is the value of white. The result is C-contiguous,
    (channels, h, w).
    """
    h, w, samples = pixels.shape
    assert samples in (1, channels)
    out = np.empty((channels, h, w), np.float32)
    quarter = np.float32(peak) / np.float32(4)
    for c in range(channels):
        np.divide(pixels[:, :, c % samples], quarter, out=out[c], dtype=np.float32)
    out -= np.float32(2)
    return out


def check_window(rows: Span, cols: Span, size: Size) -> None:
    """Asserts that a window is a non-empty part of an image of this size."""
    for (start, stop), length in zip((rows, cols), size, strict=True):
        assert 0 <= start < stop <= length, f"window {rows} x {cols} of an image of {size}"
