"""Finds the tissue of a slide: what has more colour than the glass around it.

    level     ->  small copy  ->  saturation  ->  Otsu's threshold  ->  share of a patch

Source:
    N. Otsu, "A threshold selection method from gray-level histograms", IEEE Transactions on
    Systems, Man, and Cybernetics 9(1), 1979, equations 12 to 18.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.data.image_fit import resize
from hires.data.image_format import ImageError, Pixels, Size, Span
from hires.data.slide_file import slide_level

MOST_CELLS = 2048
"""Most cells on a side of a map of a slide."""
_CELLS_OF_PATCH = 8
"""On a side, where the slide has so many."""

_GLASS = 25
"""Greatest mean saturation of glass, of 255; scanners tint it."""
_CONTRAST = 8
"""Least difference of the mean saturations of tissue and glass; CLAM's least one of tissue (Lu et
al., Nature Biomedical Engineering 5, 2021). Noise of blank slides, shrunk, differs by 1 or 2."""

Cells = NDArray[Any]
"""(h, w): a number for each cell of a slide."""


def map_size(slide: Size, patch: Size) -> Size:
    """Returns rows and columns of cells of a map of a slide, given its size and that of patches."""
    rows, cols = (
        min(length, MOST_CELLS, max(1, _CELLS_OF_PATCH * length // side))
        for length, side in zip(slide, patch, strict=True)
    )
    return rows, cols


def small_copy(path: Path, levels: Sequence[Size], size: Size, max_pixels: int) -> Pixels:
    """Returns a slide shrunk to a size, (h, w, 3), from 0 to 1, of the coarsest level that serves.

    ImageError: it has no three colours.
    """
    fine = [level for level, held in enumerate(levels) if held[0] >= size[0] and held[1] >= size[1]]
    image = slide_level(path, fine[-1] if fine else 0, max_pixels)
    if image.colours != 3:
        raise ImageError("it has no colours by which tissue differs from glass; use data.tissue=0")

    def read(rows: Span, cols: Span) -> Pixels:
        return image.read(rows, cols)[:, :, :3]

    small = resize(read, image.size, size, (0, size[0]), (0, size[1]))
    return np.asarray(small / np.float32(image.peak))


def tissue_of(small: Pixels) -> NDArray[np.bool_]:
    """Returns which cells of a small copy, (h, w, 3), are tissue, by the saturation of HSV.

    Otsu's threshold divides noise, too: of one kind of cells all are tissue, or none.
    """
    most, least = small.max(2), small.min(2)
    saturation = np.divide(most - least, most, out=np.zeros_like(most), where=most > 0)
    levels = np.floor(saturation * 255 + 0.5).clip(0, 255).astype(np.uint8)
    found: NDArray[np.bool_] = levels > otsu(levels)
    low, high = (levels[part].mean() if part.any() else levels.mean() for part in (~found, found))
    if low > _GLASS or high - low < _CONTRAST:
        return np.full_like(found, low > _GLASS)
    return found


def otsu(levels: NDArray[np.uint8]) -> int:
    """Returns the level up to which numbers belong to the lower of two classes."""
    share = np.bincount(levels.ravel(), minlength=256) / levels.size
    below = np.cumsum(share)  # omega of the source
    mean = np.cumsum(share * np.arange(256))  # mu
    inside = below * (1 - below)
    between = np.zeros(256)
    divides = inside > 1e-12
    between[divides] = np.square(mean[-1] * below - mean)[divides] / inside[divides]
    return int(between.argmax())


def tissue_shares(
    cells: Cells, slide: Size, places: Sequence[tuple[int, int]], patch: Size
) -> NDArray[np.float64]:
    """Returns the share of tissue below each patch of a slide, from a map of its cells.

    Source:
        F. Crow, "Summed-area tables for texture mapping", SIGGRAPH 1984.
    """
    s = np.zeros((cells.shape[0] + 1, cells.shape[1] + 1))
    s[1:, 1:] = cells.astype(np.float64).cumsum(0).cumsum(1)
    ends = []
    for starts, side, num_cells, length in zip(
        np.reshape(places, (-1, 2)).T, patch, cells.shape, slide, strict=True
    ):
        first = (starts * (num_cells / length) + 0.5).astype(int).clip(max=num_cells - 1)
        last = ((starts + side) * (num_cells / length) + 0.5).astype(int)
        ends += [first, last.clip(first + 1, num_cells)]
    r0, r1, c0, c1 = ends
    total = s[r1, c1] - s[r0, c1] - s[r1, c0] + s[r0, c0]
    shares: NDArray[np.float64] = total / ((r1 - r0) * (c1 - c0))
    return shares
