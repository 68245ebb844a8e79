"""Writes the map, or image, of each sample into a file: every rank the part that it computed.

    rank 0          makes ID.ome.tif |                  before the barrier of the step
    rank 0, rank 1  write            |  rows 0 to 149, rows 150 to 299: no rank holds the whole map

    ome-tiff   ID.ome.tif   a page for each class, or one of colours, and OME-XML: axes, classes
    zarr       ID.zarr      a folder of chunks, by the package zarr

Both are uncompressed. A part of a TIFF is written through a mapping of the file, whose blocks are
allocated at once: on a full disk a mapping would end the process by SIGBUS. Ranks share chunks
where a tile ends inside one, and the package writes a chunk anew: one rank writes at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import os
import re
import shutil
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
from numpy.typing import NDArray

from hires.core.config.data_config import OME_TIFF, ZARR
from hires.core.errors import RunError
from hires.core.shipped import adding
from hires.core.store.files import cannot_write, make_folder

BIG_BYTES = 2**32 - 2**25
"""Size from which a file is a BigTIFF, with offsets of 64 bits."""
CHUNK = 1024
"""Rows and columns of a chunk at the most, whatever the layout: its files are the same in all."""
Place = tuple[slice, ...]
_MOST_BYTES = 180  # of a name; file systems take 255
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


class PredictionMaps:
    """The files of a data set in one folder."""

    def __init__(
        self, folder: Path, names: Iterable[str], kind: MapKind, form: str = OME_TIFF
    ) -> None:
        """Makes the folder; RunError: it cannot be made, or a package that it needs is missing.

        ``names`` are those of all samples, and ``form`` is one of ``predict.format``.
        """
        self.kind = kind
        self._zarr: Any = None
        if form == ZARR:
            if find_spec("zarr") is None:
                raise RunError(f"predict.format=zarr needs the package zarr; {adding('zarr')}")
            self._zarr = importlib.import_module("zarr")
        self.folder, self.names = folder, safe_names(names, ".zarr" if self._zarr else ".ome.tif")
        make_folder(folder)

    def make(self, sample: int) -> None:
        """Makes the file of a sample, of zeros, unless it is there; RunError: it cannot.

        One rank calls it, before any writes.
        """
        path = self.folder / self.names[sample]
        if path.exists():  # of an attempt that was interrupted
            return
        hidden = path.with_name(f".{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            (self._make_zarr if self._zarr else self._make_tiff)(hidden)
            hidden.rename(path)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.unlink(missing_ok=True)
            raise cannot_write(path, error) from error

    def write(self, sample: int, part: NDArray[Any], place: Place) -> None:
        """Writes the part of a sample's map at a place, as numpy indexes it.

        RunError: the file cannot be written.
        """
        path = self.folder / self.names[sample]
        try:
            with locked_for_writing(path / "zarr.json" if self._zarr else path):
                if self._zarr:
                    self._zarr.open_array(str(path), mode="r+")[place] = part
                    return
                mapped = tifffile.memmap(path, mode="r+")
                mapped.reshape(self.kind.shape)[place] = part
                mapped.flush()
        except (OSError, ValueError) as error:
            raise cannot_write(path, error) from error

    def _make_tiff(self, path: Path) -> None:
        shape, dtype, axes, names = self.kind
        classes = [xml_text(name) for name in names]
        about: dict[str, Any] = {"axes": axes, "Creator": "hires"}
        about["UUID"] = str(uuid.uuid5(uuid.NAMESPACE_OID, os.fsencode(path.name).hex()))
        options: dict[str, Any] = {"photometric": "minisblack", "ome": True}
        if axes == "CYX":
            about["Channel"] = {"Name": classes}
        elif classes:
            numbers = {str(number): name for number, name in enumerate(classes)}
            about |= {"Channel": {"Name": ["class"]}, "MapAnnotation": numbers}
        if axes == "YXS" and shape[2] == 1:
            # A last axis of one colour would be columns, and each row a page.
            shape, about["axes"] = shape[:2], "YX"
        elif axes == "YXS":
            colours = "rgb" if shape[2] == 3 else "minisblack"
            options |= {"planarconfig": "contig", "photometric": colours}
        bigtiff = int(np.prod(shape)) * np.dtype(dtype).itemsize > BIG_BYTES
        tifffile.memmap(path, shape=shape, dtype=dtype, bigtiff=bigtiff, metadata=about, **options)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    def _make_zarr(self, path: Path) -> None:
        assert self._zarr is not None
        shape, dtype, axes, names = self.kind
        classes = [xml_text(name) for name in names]
        self._zarr.create_array(
            str(path),
            shape=tuple(shape),
            chunks=map_chunks(shape, axes),
            dtype=np.dtype(dtype).name,
            compressors=None,
            fill_value=0,
            dimension_names=[*axes.lower()],
            attributes={"classes": classes} if classes else {},
        )


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


def safe_names(ids: Iterable[str], suffix: str) -> list[str]:
    """Returns the file name of each sample, all different, without folders.

    All characters but letters, digits and ``_.+-`` are replaced by ``_``. Where this makes names
    equal, the later ones get their number appended. Leading dots and hyphens are removed, so that
    no file is hidden or read as an option of a command. The ending of a TIFF file, as slides have,
    is replaced by ``suffix``.
    """
    names, taken = [], set[str]()
    for number, own in enumerate(ids):
        stem = re.sub(r"(.)(\.ome)?\.tiff?$", r"\1", own, flags=re.IGNORECASE)
        stem = re.sub(r"[^\w.+-]+", "_", stem).lstrip(".-") or "_"
        stem = stem.encode()[:_MOST_BYTES].decode(errors="ignore")
        name, tries = stem, number
        while (key := unicodedata.normalize("NFKC", name).casefold()) in taken:
            name, tries = f"{stem}-{tries}", tries + 1
        taken.add(key)
        names.append(f"{name}{suffix}")
    return names
