"""Makes the file of one map in a format, and writes parts of it.

    tiff       ID.tif       one page of planes, or of colours
    ome-tiff   ID.ome.tif   the same pixels, a page for each class, and OME-XML: axes, type, classes
    zarr       ID.zarr      a folder of chunks, by the package zarr

All are uncompressed. A part of a TIFF is written through a mapping of the file, whose blocks are
allocated at once: on a full disk a mapping would end the process by SIGBUS. Ranks share chunks
where a tile ends inside one, and the package writes a chunk anew: one rank writes at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import OME_TIFF, TIFF, ZARR
from hires.core.errors import RunError

BIG_BYTES = 2**32 - 2**25
"""Size from which a file is a BigTIFF, with offsets of 64 bits."""
CHUNK = 1024
"""Rows and columns of a chunk at the most, whatever the layout: its files are the same in all."""
Place = tuple[slice, ...]
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""A file system has none."""
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class MapKind(NamedTuple):
    """What every map of a prediction is."""

    shape: Sequence[int]
    dtype: Any
    axes: str
    """A letter for each of ``shape``: C class, Y row, X column, S colour."""
    classes: Sequence[str] = ()
    """Names of the classes, of a map of them or of their probabilities."""


class MapFormat(Protocol):
    """How the file of a map is made and written."""

    suffix: str

    def make(self, path: Path, identity: str) -> None:
        """Makes a file of zeros; of equal ``identity`` they are equal. OSError: it cannot."""
        ...

    def write(self, path: Path, part: NDArray[Any], place: Place) -> None:
        """Writes a part at a place; OSError, ValueError: it cannot."""
        ...


def map_format(name: str, kind: MapKind) -> MapFormat:
    """Returns the format of a name of ``predict.format``; RunError: there is no tifffile."""
    kinds: dict[str, Callable[[MapKind], MapFormat]] = {
        TIFF: TiffFormat, OME_TIFF: OmeTiffFormat, ZARR: ZarrFormat,
    }  # fmt: skip
    return kinds[name](kind)


class TiffFormat:
    """One TIFF, or above 4 GB one BigTIFF."""

    suffix = ".tif"

    def __init__(self, kind: MapKind) -> None:
        try:
            import tifffile
        except ImportError:
            text = "task=predict writes maps with tifffile, which is not installed: pip install it"
            raise RunError(text) from None
        self._tifffile, self._kind = tifffile, kind
        grey = kind.axes == "YXS" and kind.shape[2] == 1
        # A last axis of one colour would be columns, and each row a page.
        self._shape, self._axes = (kind.shape[:2], "YX") if grey else (kind.shape, kind.axes)

    def make(self, path: Path, identity: str) -> None:
        """Makes a file of zeros in one piece; OSError: it cannot."""
        num_bytes = int(np.prod(self._kind.shape)) * np.dtype(self._kind.dtype).itemsize
        options = {"bigtiff": num_bytes > BIG_BYTES, **self._options(identity)}
        self._tifffile.memmap(path, shape=self._shape, dtype=self._kind.dtype, **options)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    def write(self, path: Path, part: NDArray[Any], place: Place) -> None:
        """Writes a part at a place; OSError, ValueError: it cannot."""
        with locked_for_writing(path):
            mapped = self._tifffile.memmap(path, mode="r+")
            mapped.reshape(self._kind.shape)[place] = part
            mapped.flush()

    def _options(self, identity: str) -> dict[str, Any]:
        # What tifffile calls metadata, photometric and planarconfig.
        options: dict[str, Any] = {"metadata": None, "photometric": "minisblack"}
        if self._axes == "YXS":
            options["planarconfig"] = "contig"
            if self._shape[2] == 3:
                options["photometric"] = "rgb"
        elif self._axes == "CYX" and self._shape[0] > 1:
            options["planarconfig"] = "separate"
        return options


class OmeTiffFormat(TiffFormat):
    """A TIFF whose first page has OME-XML; readers of it show classes by their names."""

    suffix = ".ome.tif"

    def _options(self, identity: str) -> dict[str, Any]:
        options, classes = super()._options(identity), [*map(xml_text, self._kind.classes)]
        about: dict[str, Any] = {
            "axes": self._axes,
            "Creator": "hires",
            "UUID": str(uuid.uuid5(uuid.NAMESPACE_OID, os.fsencode(identity).hex())),
        }
        if self._axes == "CYX":
            options.pop("planarconfig", None)  # a page for each class
            about["Channel"] = {"Name": classes}
        elif classes:
            numbers = {str(number): name for number, name in enumerate(classes)}
            about |= {"Channel": {"Name": ["class"]}, "MapAnnotation": numbers}
        return {**options, "ome": True, "metadata": about}


class ZarrFormat:
    """A folder of Zarr 3."""

    suffix = ".zarr"

    def __init__(self, kind: MapKind) -> None:
        try:
            import zarr
        except ImportError:
            text = "predict.format=zarr needs the package zarr: pip install 'hires[zarr]'"
            raise RunError(text) from None
        self._zarr, self._kind = zarr, kind

    def make(self, path: Path, identity: str) -> None:
        """Makes a folder of zeros; OSError: it cannot."""
        shape, axes = tuple(self._kind.shape), self._kind.axes
        classes = [xml_text(name) for name in self._kind.classes]
        self._zarr.create_array(
            str(path),
            shape=shape,
            chunks=map_chunks(shape, axes),
            dtype=np.dtype(self._kind.dtype).name,
            compressors=None,
            fill_value=0,
            dimension_names=[*axes.lower()],
            attributes={"classes": classes} if classes else {},
        )

    def write(self, path: Path, part: NDArray[Any], place: Place) -> None:
        """Writes a part at a place; OSError, ValueError: it cannot."""
        with locked_for_writing(path / "zarr.json"):
            self._zarr.open_array(str(path), mode="r+")[place] = part


def map_chunks(shape: Sequence[int], axes: str) -> tuple[int, ...]:
    """Returns the sizes of a chunk: one class of a map, all colours of an image.

    ``axes`` are letters of ``CYXS``: class, row, column, colour.

    >>> map_chunks([4, 9000, 300], "CYX")
    (1, 1024, 300)
    """
    most = {"C": 1, "S": max(shape)}
    return tuple(min(size, most.get(a, CHUNK)) for size, a in zip(shape, axes, strict=True))


@contextlib.contextmanager
def locked_for_writing(path: Path) -> Iterator[None]:
    """Holds the lock of a file while parts of it are written; OSError: it cannot be opened.

    Two nodes that write into one page of a network file system would each send the page as they see
    it. A file system without locks is used without.
    """
    with path.open("r+b") as file:  # NFS locks only what is open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def xml_text(name: str) -> str:
    r"""Returns a name of a class without what neither XML nor UTF-8 can hold.

    >>> xml_text("a\x01b\udcff")
    'a_b_'
    """
    return _NO_XML.sub("_", name)
