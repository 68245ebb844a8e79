"""Defines windows of images and the sources that read them.

0     cols        W       A window is the part rows x cols of an image. Its numbers are bit for
+-----------------+       bit those of the same part of the whole image, whatever the window:
|     +----+      | rows  pixels go through elementwise operations that IEEE 754 rounds alike
|     |    |      |       everywhere (+ - * / on float32); sines and sums, whose rounding may
|     +----+      |       depend on the position in a vector, are taken over whole axes first.
+-----------------+ H
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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


class Source(Protocol):
    """Labelled images of one size, of which any window can be read alone."""

    num_classes: int
    """Labels go from 0 to this, exclusive."""
    class_names: tuple[str, ...]
    """One name per label."""

    def __len__(self) -> int:
        """Returns the number of images."""
        ...

    def label(self, i: int) -> int:
        """Returns the class of image ``i``; reads no pixel."""
        ...

    def window(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a part of image ``i``, in pixels of an image at the size of the config.

        Returns:
            (C, h, w) float32, C-contiguous, from -2 (black) to 2 (white): bit for bit the same
            numbers as this part of the window that is the whole image.

        Raises:
            RunError: the image cannot be read; the message names the file.
        """
        ...


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
