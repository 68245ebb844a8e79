"""Reads the predicted maps of a run piece by piece, and shrinks them to what a page shows.

12,000 x 9,000 pixels        every 15th of every 15th row
+----+----+----+             +--+
|    |    |    |    -->      |  |  800 x 600, and how many pixels each class has
+----+----+----+             +--+
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.store import file_names, reading
from hires.core.store.reading import Notes, text
from hires.report.read.plain_values import count, dig
from hires.report.read.runs import Run

MAX_SIDE = 800
"""Pixels of an overview on its longer side."""
MAX_COUNTED = 2**28
"""Pixels of a map of which all are counted; of larger ones those that the overview shows."""
PIECE_BYTES = 2**18
"""Of the numbers that are read at once."""
MAX_CHUNK_BYTES = 2**28
"""Of a Zarr folder; one that claims more is a stranger's."""
NOT_FINITE = -1
_DTYPES = ("uint8", "uint16", "float32")
_AXES = ("YX", "CYX", "YXS")
_MAX_NAME = 60
Place = tuple[slice, ...]
Read = Callable[[Place], NDArray[Any]]


@dataclass
class Overview:
    """A predicted map, or image, as a page shows it."""

    name: str
    size: tuple[int, int]
    """Rows and columns of the whole map."""
    classes: NDArray[np.int32] | None = None
    """(h, w), the class of each shown pixel or ``NOT_FINITE``; None: it is an image."""
    shares: NDArray[np.float32] | None = None
    """(h, w), the probability of that class; None: it was not written."""
    image: NDArray[np.float32] | None = None
    """(h, w, 3) from black (0) to white (1)."""
    names: list[str] = field(default_factory=list)
    """Of the classes."""
    pixels: Counter[int] = field(default_factory=Counter)
    """How many pixels have a class."""
    is_whole: bool = True
    """Whether all pixels were counted."""


def has_maps(run: Run) -> bool:
    """Returns whether a run is a complete prediction of maps whose facts can be read."""
    return run.end[0] == "done" and _facts(run) is not None


def num_maps(run: Run) -> int:
    """Returns how many maps a prediction wrote."""
    return count(dig(run.record, "prediction", "images")) or 0


def overviews(run: Run, most: int, notes: Notes) -> list[Overview]:
    """Returns the first maps of a prediction; what cannot be read is left out, with a note."""
    folder, facts = run.shown.folder / file_names.PREDICTIONS, _facts(run)
    assert facts is not None
    found = []
    for path in heapq.nsmallest(most, file_names.entries_of(folder), key=_natural):
        try:
            found.append(_overview(path, *facts))
        except (OSError, ValueError, KeyError) as error:
            if notes is not None:
                notes.append(reading.note(path, f"is not drawn: {error}"[:200]))
    return found


def _facts(run: Run) -> tuple[list[int], str, str, list[str]] | None:
    """Returns shape, type, axes and names of classes of each map; None: there are none."""
    held = dig(run.record, "prediction", "map")
    if not isinstance(held, dict):
        return None
    shape, names = held.get("shape"), held.get("classes")
    sizes = [count(one) or 0 for one in shape] if isinstance(shape, list) else []
    dtype, axes = held.get("dtype"), held.get("axes")
    if dtype not in _DTYPES or axes not in _AXES or len(sizes) != len(axes) or min(sizes) < 1:
        return None
    shown = [text(name, _MAX_NAME) or "?" for name in (names if isinstance(names, list) else ())]
    return sizes, dtype, axes, shown


def _natural(path: Path) -> list[Any]:
    """Returns a key by which 2.tif is before 10.tif."""
    parts = re.split(r"(\d{1,9})", path.name)
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]


def _overview(path: Path, shape: list[int], dtype: str, axes: str, names: list[str]) -> Overview:
    read = _reader(path, shape, dtype, axes)
    size = shape[axes.index("Y")], shape[axes.index("X")]
    step = math.ceil(max(size) / MAX_SIDE)
    small = [math.ceil(side / step) for side in size]
    stem = text(path.name.partition(".")[0], _MAX_NAME) or "?"
    made = Overview(stem, size, names=names, is_whole=math.prod(size) <= MAX_COUNTED)
    if axes == "YXS":
        made.image = np.zeros((*small, 3), np.float32)
    else:
        made.classes = np.zeros(small, np.int32)
        made.shares = np.zeros(small, np.float32) if axes == "CYX" else None
    of_pixel = math.prod(shape) // math.prod(size) * np.dtype(dtype).itemsize
    for place in _pieces(size, step, of_pixel):
        spans = dict(zip("YX", place, strict=True))
        piece = read(tuple(spans.get(axis, slice(None)) for axis in axes))
        at = tuple(slice(one.start // step, math.ceil(one.stop / step)) for one in place)
        _add(made, piece, at, step)
    return made


def _pieces(size: tuple[int, int], step: int, of_pixel: int) -> Iterator[Place]:
    """Yields the parts of a map, which begin at pixels that the overview shows."""
    side = max(1, math.isqrt(PIECE_BYTES // of_pixel) // step) * step
    for row, column in itertools.product(range(0, size[0], side), range(0, size[1], side)):
        yield slice(row, min(row + side, size[0])), slice(column, min(column + side, size[1]))


def _add(made: Overview, piece: NDArray[Any], at: Place, step: int) -> None:
    """Puts a piece into an overview."""
    if made.image is not None:
        shown = piece[::step, ::step, : 3 if piece.shape[2] >= 3 else 1]
        made.image[at] = np.nan_to_num(shown).clip(0, 1)
        return
    assert made.classes is not None
    shown = piece if made.is_whole else piece[..., ::step, ::step]
    left = step if made.is_whole else 1
    classes, shares = _classes(shown)
    numbers = np.bincount(classes.ravel() - NOT_FINITE)
    for label in np.flatnonzero(numbers).tolist():
        made.pixels[label + NOT_FINITE] += int(numbers[label])
    made.classes[at] = classes[::left, ::left]
    if made.shares is not None and shares is not None:
        made.shares[at] = shares[::left, ::left]


def _classes(piece: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
    """Returns the class of each pixel, and of a piece of probabilities the largest one."""
    if piece.ndim == 2:
        classes = piece.astype(np.int32)
        classes[piece == np.iinfo(piece.dtype).max] = NOT_FINITE
        return classes, None
    shares = piece.max(0)
    classes = np.where(np.isfinite(shares), piece.argmax(0), NOT_FINITE).astype(np.int32)
    return classes, shares


def _reader(path: Path, shape: list[int], dtype: str, axes: str) -> Read:
    """Returns what reads a part of a map; OSError, ValueError: it cannot."""
    if path.suffix == ".zarr":
        try:
            import zarr
        except ImportError:
            raise ValueError("it needs the package zarr: pip install 'hires[zarr]'") from None
        array = zarr.open_array(str(path), mode="r")
        facts = array.shape, array.dtype.name, array.compressors, array.filters
        num_bytes = math.prod(array.chunks) * array.dtype.itemsize
        if facts != (tuple(shape), dtype, (), ()) or num_bytes > MAX_CHUNK_BYTES:
            raise ValueError("it is no map of this prediction")
        return lambda place: np.asarray(array[place])
    if not path.is_file():
        raise ValueError("it is no file")
    import tifffile

    mapped = tifffile.memmap(path, mode="r").reshape(shape)
    return lambda place: np.array(mapped[place])
