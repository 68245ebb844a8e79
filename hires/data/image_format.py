"""Defines windows of images, and registers the formats of image files.

To add a format, write a file like ``tiff.py`` that registers the function which opens a file under
its suffixes, and import it in the package's ``__init__``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hires.core.registry import Registry

Span = tuple[int, int]
"""``[start, stop)`` in pixels."""

Size = tuple[int, int]
"""(height, width) in pixels."""

Pixels = NDArray[Any]
"""(h, w, samples): values as they were stored, of any unsigned or floating type."""

Window = NDArray[np.float32]
"""(C, h, w): values as the network takes them, C-contiguous."""


class ImageError(ValueError):
    """An image has no defined treatment; the message says what would work."""


class ImageFile(Protocol):
    """An open file, which gives any window of its first image as it is stored."""

    size: Size
    colours: int
    """Samples that are colours: 1 or 3."""
    peak: float
    """The value of white."""

    def read(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of the image, (h, w, samples), colours first."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


FORMATS: Registry[Callable[[Path], ImageFile]] = Registry("image format")
"""Suffix in lower case -> opener, which raises an ImageError or whatever its decoder raises."""


def suffix_of(name: str) -> str:
    """Returns the suffix that FORMATS may have, as ``.tif``; none of a name without a stem."""
    stem, dot, suffix = name.rpartition(".")
    return dot + suffix.lower() if stem else ""


def open_image(path: Path) -> ImageFile:
    """Opens a file of a registered format; a broken one raises whatever its decoder raises."""
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    return FORMATS[suffix_of(path.name)](path)


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
