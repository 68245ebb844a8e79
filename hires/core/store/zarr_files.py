"""Writes and reads arrays as Zarr 3 folders of uncompressed chunks, each of which is mapped.

    ID.zarr/  zarr.json        shape, type, chunks, names of the axes, attributes
              c/0/0  c/0/1     one file a chunk, all of one size: the last ones reach over the end
              c/1/0  c/1/1

Ranks share chunks where a tile ends inside one. The package zarr reads a chunk, changes it and
writes it anew, so one of two ranks that do so at once would undo the other; a part of a mapped file
is changed alone. That is why the folder is written here.

Source:
    Zarr core specification, version 3, https://zarr-specs.readthedocs.io/en/latest/v3/core/
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.store.shared_files import locked_for_writing

CHUNK = 1024
"""Rows and columns of a chunk at the most, whatever the layout: its files are the same in all."""
_FACTS = "zarr.json"
_CHUNKS = "c"
Place = tuple[slice, ...]


class ZarrFolder:
    """An array in a folder, as its facts describe it."""

    def __init__(self, path: Path, shape: Sequence[int], chunks: Sequence[int], dtype: Any) -> None:
        self.path, self.shape, self.chunks = path, tuple(shape), tuple(chunks)
        self.dtype = np.dtype(dtype).newbyteorder("<")

    def chunk_files(self) -> Iterator[Path]:
        """Yields the file of every chunk."""
        counts = (-(-size // own) for size, own in zip(self.shape, self.chunks, strict=True))
        for index in itertools.product(*map(range, counts)):
            yield self.path.joinpath(_CHUNKS, *map(str, index))

    def write(self, part: NDArray[Any], place: Place) -> None:
        """Writes a part of the array at a place; OSError: it cannot."""
        for file, inside, within in self._overlaps(place):
            with locked_for_writing(file):
                mapped = np.memmap(file, self.dtype, "r+", shape=self.chunks)
                mapped[inside] = part[within]
                mapped.flush()

    def read(self, place: Place) -> NDArray[Any]:
        """Returns a part of the array; OSError, ValueError: a chunk is missing, or cut off."""
        part = np.empty([one.stop - one.start for one in self._whole(place)], self.dtype)
        for file, inside, within in self._overlaps(place):
            part[within] = np.memmap(file, self.dtype, "r", shape=self.chunks)[inside]
        return part

    def _whole(self, place: Place) -> Place:
        # With numbers for what a slice leaves open.
        sizes = zip(place, self.shape, strict=True)
        return tuple(slice(*one.indices(size)[:2]) for one, size in sizes)

    def _overlaps(self, place: Place) -> Iterator[tuple[Path, Place, Place]]:
        """Yields each chunk that a place touches: its file, where in it, and where in the place."""
        place = self._whole(place)
        ranges = (
            range(one.start // own, -(-one.stop // own))
            for one, own in zip(place, self.chunks, strict=True)
        )
        for index in itertools.product(*ranges):
            inside, within = [], []
            for number, own, one in zip(index, self.chunks, place, strict=True):
                first, end = max(number * own, one.start), min((number + 1) * own, one.stop)
                inside.append(slice(first - number * own, end - number * own))
                within.append(slice(first - one.start, end - one.start))
            yield self.path.joinpath(_CHUNKS, *map(str, index)), tuple(inside), tuple(within)


def map_chunks(shape: Sequence[int], axes: str) -> tuple[int, ...]:
    """Returns the sizes of a chunk: one class of a map, all colours of an image.

    ``axes`` are letters of ``CYXS``: class, row, column, colour.

    >>> map_chunks([4, 9000, 300], "CYX")
    (1, 1024, 300)
    """
    most = {"C": 1, "S": max(shape)}
    return tuple(min(size, most.get(a, CHUNK)) for size, a in zip(shape, axes, strict=True))


def make_zarr(
    path: Path, shape: Sequence[int], dtype: Any, axes: str, attributes: dict[str, Any]
) -> None:
    """Makes the folder of an array of zeros, with all blocks of its chunks; OSError: it cannot."""
    folder = ZarrFolder(path, shape, map_chunks(shape, axes), dtype)
    endian = {} if folder.dtype.itemsize == 1 else {"configuration": {"endian": "little"}}
    facts = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": folder.shape,
        "data_type": folder.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": folder.chunks}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", **endian}],
        "attributes": attributes,
        "dimension_names": [*axes.lower()],
    }
    path.mkdir()
    (path / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    num_bytes = int(np.prod(folder.chunks)) * folder.dtype.itemsize
    for file in folder.chunk_files():
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as held:
            os.posix_fallocate(held.fileno(), 0, num_bytes)
