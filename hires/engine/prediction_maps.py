"""Writes the map, or image, of each sample into a file: every rank the part that it computed.

    rank 0          makes ID.ome.tif |                  before the barrier of the step
    rank 0, rank 1  write            |  rows 0 to 149, rows 150 to 299: no rank holds the whole map

A map has the size of its image, and its place. Each of its pixels is that of the output at its
centre, so it comes from one rank:

    output of 4 columns   | 0   1 | 2   3 |        rank 0 has 0 and 1
    map of 6 columns      0  0  1 | 2  3  3        and writes 0 to 2

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
import math
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
from hires.core.programs import adding
from hires.core.store.files import cannot_write, make_folder
from hires.data.georeference import KEYS, TEXT, Georeference
from hires.plan.graph import Rect

BIG_BYTES = 2**32 - 2**25
"""Size from which a file is a BigTIFF, with offsets of 64 bits."""
CHUNK = 1024
"""Rows and columns of a chunk at the most, whatever the layout: its files are the same in all."""
NODATA = 42113
"""Tag of GDAL: the value of pixels without data."""
_MOST_BYTES = 180  # of a name; file systems take 255
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""A file system has none."""
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # nor any UTF-8


class MapKind(NamedTuple):
    """What every map of a prediction is."""

    channels: int
    """Classes with a probability, or colours; 1 of a map of classes."""
    dtype: Any
    axes: str
    """C class, Y row, X column, S colour: ``CYX``, ``YX`` or ``YXS``."""
    classes: Sequence[str] = ()
    """Names of the classes, of a map of them or of their probabilities."""

    def shape(self, size: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a map of [rows, columns]."""
        sizes = {"Y": size[0], "X": size[1]}
        return tuple(sizes.get(axis, self.channels) for axis in self.axes)

    @property
    def missing(self) -> Any:
        """The value of a pixel without a prediction."""
        dtype = np.dtype(self.dtype)
        return np.iinfo(dtype).max if dtype.kind == "u" else np.nan


class MapPlace(NamedTuple):
    """Which pixels of a network's output a map takes, and where it lies."""

    rows: NDArray[np.intp]
    """Row of the output of each row of the map; -1: none."""
    cols: NDArray[np.intp]
    reference: Georeference = Georeference()

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the map."""
        return len(self.rows), len(self.cols)

    @property
    def num_predicted(self) -> int:
        """Pixels of the map that the output has."""
        return int((self.rows >= 0).sum() * (self.cols >= 0).sum())

    def uses(self, rect: Rect) -> list[NDArray[np.intp]]:
        """Returns how often the map takes each row, and each column, of a part of the output."""
        lines = (self.rows, *rect[:2]), (self.cols, *rect[2:])
        return [np.bincount(n[_within(n, a, b)] - a, minlength=b - a) for n, a, b in lines]


class PredictionMaps:
    """The files of a data set in one folder."""

    def __init__(
        self, folder: Path, names: Iterable[str], kind: MapKind, form: str = OME_TIFF
    ) -> None:
        """Makes the folder; RunError: it cannot be made, or a package that it needs is missing.

        ``names`` are those of all samples, and ``form`` is one of ``predict.format``.
        """
        self.kind = kind
        self._classes = [_NO_XML.sub("_", name) for name in kind.classes]
        self._zarr: Any = None
        if form == ZARR:
            if find_spec("zarr") is None:
                raise RunError(f"predict.format=zarr needs the package zarr; {adding('zarr')}")
            self._zarr = importlib.import_module("zarr")
        self.folder, self.names = folder, safe_names(names, ".zarr" if self._zarr else ".ome.tif")
        make_folder(folder)

    def make(self, sample: int, place: MapPlace) -> None:
        """Makes the file of a sample's map unless it is there; RunError: it cannot.

        One rank calls it, before any writes.
        """
        path = self.folder / self.names[sample]
        if path.exists():  # of an attempt that was interrupted
            return
        hidden = path.with_name(f".{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            (self._make_zarr if self._zarr else self._make_tiff)(hidden, place)
            hidden.rename(path)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.unlink(missing_ok=True)
            raise cannot_write(path, error) from error

    def write(self, sample: int, place: MapPlace, part: NDArray[Any], rect: Rect) -> None:
        """Writes the pixels of a sample's map that take a part of the output, as it is in maps.

        RunError: the file cannot be written.
        """
        path, axes = self.folder / self.names[sample], self.kind.axes
        lines = _within(place.rows, *rect[:2]), _within(place.cols, *rect[2:])
        if not min(map(len, lines)):
            return
        try:
            with _locked(path / "zarr.json" if self._zarr else path):
                for rows in _in_chunks(lines[0]):
                    band = part.take(place.rows[rows] - rect[0], axes.index("Y"))
                    for cols in _in_chunks(lines[1]):
                        spans = {a: slice(n[0], n[-1] + 1) for a, n in (("Y", rows), ("X", cols))}
                        index = tuple(spans.get(axis, slice(None)) for axis in axes)
                        values = band.take(place.cols[cols] - rect[2], axes.index("X"))
                        self._write_chunk(path, place, index, values)
        except (OSError, ValueError) as error:
            raise cannot_write(path, error) from error

    def _write_chunk(
        self, path: Path, place: MapPlace, index: tuple[slice, ...], values: NDArray[Any]
    ) -> None:
        # What is mapped counts as memory of the process, so the mapping ends with the chunk.
        if self._zarr:
            self._zarr.open_array(str(path), mode="r+")[index] = values
            return
        mapped = tifffile.memmap(path, mode="r+")
        mapped.reshape(self.kind.shape(place.size))[index] = values
        mapped.flush()

    def _make_tiff(self, path: Path, place: MapPlace) -> None:
        _, dtype, axes, _ = self.kind
        shape, classes = self.kind.shape(place.size), self._classes
        about: dict[str, Any] = {"axes": axes, "Creator": "hires"}
        about["UUID"] = str(uuid.uuid5(uuid.NAMESPACE_OID, os.fsencode(path.name).hex()))
        options: dict[str, Any] = {"photometric": "minisblack", "ome": True}
        if axes == "CYX":
            about["Channel"] = {"Name": classes}
        elif classes:
            numbers = {str(number): name for number, name in enumerate(classes)}
            about |= {"Channel": {"Name": ["class"]}, "MapAnnotation": numbers}
        placed, more = _placed(place.reference, self.kind)
        about, options = about | placed, options | more
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
            if place.num_predicted < math.prod(place.size):  # every pixel has a value at first
                mapped = tifffile.memmap(path, mode="r")
                block = np.full(CHUNK * CHUNK, self.kind.missing, mapped.dtype)
                file.seek(mapped.offset)
                for start in range(0, mapped.size, len(block)):
                    file.write(block[: mapped.size - start].data)

    def _make_zarr(self, path: Path, place: MapPlace) -> None:
        shape, axes = self.kind.shape(place.size), self.kind.axes
        attributes: dict[str, Any] = {"classes": self._classes} if self._classes else {}
        most = {"C": 1, "S": max(shape)}  # one class of a map, all colours of an image
        chunks = tuple(min(n, most.get(a, CHUNK)) for n, a in zip(shape, axes, strict=True))
        self._zarr.create_array(
            str(path),
            shape=shape,
            chunks=chunks,
            dtype=np.dtype(self.kind.dtype).name,
            compressors=None,
            fill_value=self.kind.missing,
            dimension_names=[*axes.lower()],
            attributes=attributes | _placed_attributes(place.reference, axes),
        )


def _within(pixels: NDArray[np.intp], start: int, stop: int) -> NDArray[np.intp]:
    # Rows, or columns, of a map that take some of the output; they lie side by side.
    return np.flatnonzero((pixels >= start) & (pixels < stop))


def _in_chunks(pixels: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    return np.split(pixels, np.flatnonzero(np.diff(pixels // CHUNK)) + 1)


def _placed(reference: Georeference, kind: MapKind) -> tuple[dict[str, Any], dict[str, Any]]:
    # Where a map lies, as OME-XML has it, and as options of tifffile.
    about, options = dict[str, Any](), dict[str, Any]()
    if reference.pixel_um is not None:
        down, across = reference.pixel_um
        about |= {"PhysicalSizeY": down, "PhysicalSizeX": across}
        about |= {"PhysicalSizeYUnit": "µm", "PhysicalSizeXUnit": "µm"}
        options |= {"resolution": (1e4 / across, 1e4 / down), "resolutionunit": "CENTIMETER"}
        if any(reference.corner):
            pages = kind.channels if kind.axes == "CYX" else 1
            places = zip("YX", reference.corner, reference.pixel_um, strict=True)
            plane = {f"Position{axis}": [start * size] * pages for axis, start, size in places}
            about["Plane"] = plane | {f"Position{axis}Unit": ["µm"] * pages for axis in "YX"}
    if tags := reference.tags:
        # GDAL takes the value as one of no data.
        all_tags = {**tags, NODATA: str(kind.missing).encode()}
        types = {KEYS: "H", TEXT: "s", NODATA: "s"}
        extra = [(n, types.get(n, "d"), len(v), v, False) for n, v in sorted(all_tags.items())]
        options["extratags"] = extra
    return about, options


def _placed_attributes(reference: Georeference, axes: str) -> dict[str, Any]:
    # As GeoZarr and OME-Zarr call them.
    made: dict[str, Any] = {}
    if reference.pixel_um is not None:
        steps = dict(zip("YX", reference.pixel_um, strict=True))
        starts = {a: n * steps[a] for a, n in zip("YX", reference.corner, strict=True)}
        units = {"type": "space", "unit": "micrometer"}
        made["axes"] = [{"name": a.lower(), **(units if a in steps else {})} for a in axes]
        scale = {"type": "scale", "scale": [steps.get(a, 1.0) for a in axes]}
        shift = {"type": "translation", "translation": [starts.get(a, 0.0) for a in axes]}
        made["coordinateTransformations"] = [scale, shift]
    if (affine := reference.affine) is not None:
        made |= {"spatial:dimensions": ["y", "x"], "spatial:transform": affine}
    if reference.epsg is not None:
        made["proj:code"] = f"EPSG:{reference.epsg}"
    return made


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Two nodes that write into one page of a network file system would each send the page as they
    # see it. A file system without locks is used without.
    with path.open("r+b") as file:  # NFS locks only what is open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


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
