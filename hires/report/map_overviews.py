"""Shrinks the predicted maps of a run to what a page shows, without reading a whole one at once.

12,000 x 9,000 pixels        every 15th of every 15th row
+----+----+----+             +--+
|    |    |    |    -->      |  |  800 x 600, and how many of them each class has
+----+----+----+             +--+
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.store import file_names, reading
from hires.core.store.reading import Notes, text
from hires.report.record import RecordedMap
from hires.report.runs import Run

MAX_SIDE = 800
"""Pixels of an overview on its longer side."""
MAX_CHUNK_BYTES = 2**28
"""Of a Zarr folder; one that claims more is a stranger's."""
NOT_FINITE = -1
_DTYPES = ("uint8", "uint16", "float32")
_AXES = ("YX", "CYX", "YXS")
_MAX_NAME = 60


@dataclass
class Overview:
    """A predicted map, or image, as a page shows it."""

    name: str
    size: tuple[int, int]
    """Rows and columns of the whole map."""
    names: list[str]
    """Of the classes."""
    classes: NDArray[np.int32] | None = None
    """(h, w), the class of each shown pixel or ``NOT_FINITE``; None: it is an image."""
    shares: NDArray[np.float32] | None = None
    """(h, w), the probability of that class; None: it was not written."""
    image: NDArray[np.float32] | None = None
    """(h, w, 3) from black (0) to white (1)."""
    pixels: Counter[int] = field(default_factory=Counter)
    """How many of the shown pixels have a class."""


def has_maps(run: Run) -> bool:
    """Returns whether a run is a complete prediction of maps."""
    return run.end[0] == "done" and _map_of(run) is not None


def overviews(run: Run, most: int, notes: Notes) -> list[Overview]:
    """Returns the first maps of a prediction; what cannot be read is left out, with a note."""
    folder, kind = run.shown.folder / file_names.PREDICTIONS, _map_of(run)
    assert kind is not None
    made = []
    for path in heapq.nsmallest(most, file_names.entries_of(folder), key=_natural):
        try:
            made.append(_overview(path, kind))
        except (OSError, ValueError, KeyError) as error:
            if notes is not None:
                notes.append(reading.note(path, f"is not drawn: {error}"[:200]))
    return made


def _map_of(run: Run) -> RecordedMap | None:
    """Returns what each map of a prediction is; None: there are none that can be read."""
    kind = None if run.record.prediction is None else run.record.prediction.map
    if kind is None or kind.dtype not in _DTYPES or kind.axes not in _AXES:
        return None
    return kind if len(kind.shape) == len(kind.axes) and min(kind.shape) > 0 else None


def _natural(path: Path) -> list[Any]:
    """Returns a key by which 2.tif is before 10.tif."""
    parts = re.split(r"(\d{1,9})", path.name)
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]


def _overview(path: Path, kind: RecordedMap) -> Overview:
    rows, columns = (kind.shape[kind.axes.index(axis)] for axis in "YX")
    each = slice(None, None, math.ceil(max(rows, columns) / MAX_SIDE))
    shown = _opened(path, kind)[tuple(each if axis in "YX" else slice(None) for axis in kind.axes)]
    stem = text(path.name.partition(".")[0], _MAX_NAME) or "?"
    made = Overview(stem, (rows, columns), kind.classes)
    if kind.axes == "YXS":
        colours = np.nan_to_num(shown[..., : 3 if shown.shape[2] >= 3 else 1]).clip(0, 1)
        made.image = np.broadcast_to(colours, (*colours.shape[:2], 3)).astype(np.float32)
        return made
    if kind.axes == "CYX":
        made.shares = shown.max(0)
        made.classes = np.where(np.isfinite(made.shares), shown.argmax(0), NOT_FINITE)
    else:
        made.classes = shown.astype(np.int32)
        made.classes[shown == np.iinfo(shown.dtype).max] = NOT_FINITE
    labels, numbers = np.unique(made.classes, return_counts=True)
    made.pixels.update(dict(zip(labels.tolist(), numbers.tolist(), strict=True)))
    return made


def _opened(path: Path, kind: RecordedMap) -> Any:
    """Returns a map of which parts can be read; OSError, ValueError: it is none."""
    if path.suffix == ".zarr":
        try:
            import zarr
        except ImportError:
            raise ValueError("it needs the package zarr: pip install 'hires[zarr]'") from None
        array = zarr.open_array(str(path), mode="r")
        facts = array.shape, array.dtype.name, array.compressors, array.filters
        num_bytes = math.prod(array.chunks) * array.dtype.itemsize
        if facts != (tuple(kind.shape), kind.dtype, (), ()) or num_bytes > MAX_CHUNK_BYTES:
            raise ValueError("it is no map of this prediction")
        return array
    if not path.is_file():
        raise ValueError("it is no file")
    import tifffile

    return tifffile.memmap(path, mode="r").reshape(kind.shape)
