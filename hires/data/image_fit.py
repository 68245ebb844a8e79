"""Resizes or crops images of any size to the size of the network's input, window by window.

``resize`` is bilinear with half-pixel centres; where it shrinks, the triangle widens with the scale
so that no pixel is skipped (as Pillow and torch's ``antialias=True`` do). Pairs of images are made
with a cubic kernel instead. Every output row is a weighted sum of a few source rows, then the same
along columns. A window reads only the source pixels that it depends on; the taps of every output
pixel, their weights and the order of summation do not depend on the window.

Source:
    Pillow, ``Resample.c`` (precompute_coeffs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.data.image_format import Pixels, Size, Span

Read = Callable[[Span, Span], Pixels]
"""Reads rows and columns of the source, (h, w, samples)."""

ReadWindow = Callable[[Span, Span], NDArray[Any]]
"""Returns rows and columns of a source, (C, h, w) or (h, w)."""

Place = tuple[float, float]
"""Where a crop lies in the rows and columns that it may lie in, from 0 to 1, exclusive."""

BAND_PIXELS = 4 * 2**20
"""About how many source pixels are held at once while resizing."""


@dataclass(frozen=True)
class Taps:
    """Source pixels and weights of an axis: one line per output pixel, one column per tap."""

    index: NDArray[np.intp]
    """Source pixels, (target, taps)."""
    weight: NDArray[np.float32]
    """Their weights, (target, taps); every line sums to 1."""

    def part(self, span: Span) -> tuple[Taps, Span]:
        """Returns the taps of some output pixels, counted from the first source pixel they read."""
        index = self.index[slice(*span)]
        first, last = int(index.min()), int(index.max())
        return Taps(index - first, self.weight[slice(*span)]), (first, last + 1)


def fitted(
    read: Read,
    source: Size,
    target: Size,
    fit: str,
    rows: Span,
    cols: Span,
    *,
    fill: float,
    place: Place | None = None,
) -> Pixels:
    """Returns a window of an image after ``data.fit``, (h, w, samples), in units of the source.

    ``place`` is that of a random crop; None: the middle.
    """
    if source == target:
        return read(rows, cols)
    if fit in ("crop", "random_crop"):
        place = place if fit == "random_crop" else None
        return crop(read, source, target, rows, cols, fill=fill, place=place)
    return resize(read, source, target, rows, cols)


def resize(
    read: Read, source: Size, target: Size, rows: Span, cols: Span, *, kernel: str = "linear"
) -> Pixels:
    """Returns a window of the image after resizing; its rows and columns are in target pixels.

    It is (h, w, samples) of float32 in the units of the source, or what ``read`` gave if the sizes
    agree. The cubic kernel may go a little beyond the range of the source.
    """
    if source == target:
        return read(rows, cols)
    across, source_cols = taps(source[1], target[1], kernel).part(cols)
    pixels_per_row = source[0] / target[0] * (source_cols[1] - source_cols[0])
    step = max(1, int(BAND_PIXELS / max(pixels_per_row, 1.0)))  # rows of a band
    bands = []
    for start in range(rows[0], rows[1], step):
        band = (start, min(start + step, rows[1]))
        down, source_rows = taps(source[0], target[0], kernel).part(band)
        shrunk = _resampled(read(source_rows, source_cols), down).transpose(1, 0, 2)
        bands.append(_resampled(shrunk, across).transpose(1, 0, 2))
    return bands[0] if len(bands) == 1 else np.concatenate(bands)


def crop(
    read: Read,
    source: Size,
    target: Size,
    rows: Span,
    cols: Span,
    *,
    fill: float,
    place: Place | None = None,
) -> Pixels:
    """Returns a window of the middle of an image, set in ``fill`` where the image is smaller.

    ``place``: of a crop that may lie anywhere in a larger image.
    """
    from_spans, to_spans = [], []
    for dim, (length, wanted, span) in enumerate(zip(source, target, (rows, cols), strict=True)):
        shift = (length - wanted) // 2  # source pixel of the target's pixel 0
        if place is not None and length > wanted:
            shift = int(place[dim] * (length - wanted + 1))
        start, stop = max(span[0] + shift, 0), min(span[1] + shift, length)
        from_spans.append((start, stop))
        to_spans.append(slice(start - shift - span[0], stop - shift - span[0]))
    shape = (rows[1] - rows[0], cols[1] - cols[0])
    if any(start >= stop for start, stop in from_spans):
        samples = read((0, 1), (0, 1)).shape[2]
        return np.full((*shape, samples), fill, np.float32)
    pixels = read(*from_spans)
    if pixels.shape[:2] == shape:
        return pixels
    out = np.full((*shape, pixels.shape[2]), fill, np.float32)
    out[tuple(to_spans)] = pixels
    return out


@lru_cache(maxsize=64)
def taps(source: int, target: int, kernel: str = "linear") -> Taps:
    """Returns the taps of a whole axis that is resized from ``source`` to ``target`` pixels."""
    radius, weigh = KERNELS[kernel]
    scale = source / target
    stretch = max(scale, 1.0)
    support = radius * stretch
    count = 2 * int(np.ceil(support)) + 1
    centre = (np.arange(target) + 0.5) * scale  # in pixels of the source
    first = np.floor(centre - support + 0.5).astype(np.intp)
    index = first[:, None] + np.arange(count)
    distance = np.abs(index + 0.5 - centre[:, None]) / stretch
    weight = weigh(distance)
    weight[(index < 0) | (index >= source)] = 0.0  # pixels outside the image do not count
    weight /= weight.sum(axis=1, keepdims=True)
    used = weight.any(axis=0)
    index = np.clip(index, 0, source - 1)
    return Taps(index[:, used], weight[:, used].astype(np.float32))


def _linear(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(1.0 - distance, 0.0)


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the weight of Keys' cubic kernel with a = -1/2."""
    near = (1.5 * distance - 2.5) * distance**2 + 1.0
    far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    return np.where(distance < 1, near, np.where(distance < 2, far, 0.0))


KERNELS = {"linear": (1, _linear), "cubic": (2, _cubic)}
"""Name -> (how far it reaches in pixels of the coarser image, weight by distance)."""


def _resampled(pixels: Pixels, axis: Taps) -> NDArray[np.float32]:
    flat = np.ascontiguousarray(pixels).reshape(len(pixels), -1)
    out = np.zeros((len(axis.index), flat.shape[1]), np.float32)
    # Tap by tap, so that every output value is summed in the same order in every window.
    for index, weight in zip(axis.index.T, axis.weight.T, strict=True):
        out += np.multiply(flat[index], weight[:, None], dtype=np.float32)
    return out.reshape(-1, *pixels.shape[1:])


def nearest_window(
    read: ReadWindow, source: Size, target: Size, rows: Span, cols: Span
) -> NDArray[Any]:
    """Returns a window of labels, (..., h, w), each that of the source pixel at its centre."""
    places = [
        nearest_pixels(length, wanted)[slice(*span)]
        for span, length, wanted in zip((rows, cols), source, target, strict=True)
    ]
    (down, across) = places
    spans = [(int(one[0]), int(one[-1]) + 1) for one in places]
    nearest = read(spans[0], spans[1])
    window: NDArray[Any] = nearest[..., (down - down[0])[:, None], across - across[0]]
    return window


def nearest_pixels(source: int, target: int) -> NDArray[np.intp]:
    """Returns the source pixel at the centre of each pixel of a resized axis."""
    pixels: NDArray[np.intp] = np.floor((np.arange(target) + 0.5) * source / target).astype(np.intp)
    return pixels


def output_pixels(source: int, target: int, output: int, fit: str) -> NDArray[np.intp]:
    """Returns the pixel of an output that each pixel of a map takes, along an axis; -1: none.

    An image of ``source`` pixels was fitted to ``target``, of which a network made ``output``
    pixels. The map has as many of them for each pixel of the image.
    """
    length = max(1, (2 * source * output + target) // (2 * target))
    if source == target or fit not in ("crop", "random_crop"):
        return nearest_pixels(output, length)
    pixels = np.arange(length) - (source - target) // 2 * output // target
    pixels[(pixels < 0) | (pixels >= output)] = -1
    return pixels
