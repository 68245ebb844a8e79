"""Reads a part of a TIFF file without decoding the rest.

    +----+----+----+----+
    |    |####|####|    |     # the tiles (or strips) that overlap the window are read and decoded
    +----+-##-+-##-+----+     uncompressed pixels in one piece are mapped into memory instead
    |    |####|####|    |
    +----+----+----+----+

The first page counts, unless it is the thumbnail of a larger one; all channels do that are pages of
their own (OME, ImageJ). tifffile decodes with imagecodecs, but selects segments only through zarr,
a large dependency in place of the twenty lines of ``_decoded``.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
from tifffile import PHOTOMETRIC, TIFF, TiffFile, TiffPage

from hires.data.georeference import tiff_georeference
from hires.data.image_format import (
    FORMATS,
    ORIENTATION,
    ImageError,
    ImageFacts,
    Pixels,
    Size,
    Span,
    check_claim,
)

_COLOURS: dict[int, tuple[str, int, int]] = {
    PHOTOMETRIC.MINISWHITE: ("grey", 1, 1),
    PHOTOMETRIC.MINISBLACK: ("grey", 1, 1),
    PHOTOMETRIC.RGB: ("RGB", 3, 3),
    PHOTOMETRIC.PALETTE: ("palette", 1, 3),
    PHOTOMETRIC.SEPARATED: ("CMYK", 4, 3),
    PHOTOMETRIC.YCBCR: ("RGB", 3, 3),  # only inside JPEG, whose decoder returns RGB
}
"""Colours in words, the samples that they take in the file, and colours that are read."""
JPEG = (6, 7)
_LOSSLESS = (1, 2, 3, 4, 5, 8, 32773, 32946, 34925, 34926, 50000)
"""Compressions that keep every pixel: fax, LZW, deflate, PackBits, LZMA, Zstandard."""
_MOST_PAGES = 64
"""Pages that are looked at."""
_THUMBNAIL = 4
"""A first page with so many times fewer pixels than another shows it in small."""
_ALIKE = ("is_tiled", "samplesperpixel", "dtype", "photometric")
"""What all levels of a pyramid have in common."""
_MIN_TILE = 256
"""Pixels; the format asks for sides of 16, and a file of single pixels would take hours."""


@FORMATS.register(".tiff")
@FORMATS.register(".tif")
class TiffImage:
    """The image of an open TIFF file, or a coarser level of it."""

    def __init__(self, path: Path, max_pixels: int, level: int = 0) -> None:
        # These flags are of makers whose other pages tifffile would read at once.
        self._file = TiffFile(path, is_lsm=False, is_scanimage=False, is_ndpi=False)
        self._max_pixels = max_pixels
        try:
            channels = _channel_pages(self._file)
            levels = [_levels(self._file, page)[level] for page in channels] if level else channels
            self._pages = levels
            page, self._finest = self._pages[0], channels[0]
            self._page = page
            if any(getattr(one, name) != getattr(page, name) for one in levels for name in _ALIKE):
                raise ImageError("its channels are pages that differ; save them as samples of one")
            _check_readable(page)
            kept = page.compression in _LOSSLESS
            self._lossy = "" if kept else str(getattr(page.compression, "name", page.compression))
            # What lies uncompressed in one piece is mapped.
            self._is_mapped = page.is_memmappable
            if not self._is_mapped:
                tall, wide = self._segment_size
                self._check_claim((page.tiledepth * tall, wide), "in a strip or tile")
        except BaseException:
            self._file.close()
            raise
        self.size: Size = (page.imagelength, page.imagewidth)
        self.colours = _COLOURS[page.photometric][2]
        if page.photometric in (PHOTOMETRIC.MINISWHITE, PHOTOMETRIC.MINISBLACK, PHOTOMETRIC.RGB):
            # Other samples than alpha are colours, bands as of a satellite, or channels.
            alpha = sum(kind in (1, 2) for kind in page.extrasamples)
            self.colours = len(self._pages) * page.samplesperpixel - alpha
        self._stored_peak = 1.0 if page.sampleformat == 3 else float(2**page.bitspersample - 1)
        self.peak = self._stored_peak
        if page.photometric == PHOTOMETRIC.PALETTE:  # some writers leave the upper 8 bits out
            assert page.colormap is not None
            self.peak = 65535.0 if page.colormap.max() > 255 else 255.0

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @property
    def levels(self) -> list[Size]:
        """Height and width of each level of its pyramid, the finest first."""
        pages = _levels(self._file, _channel_pages(self._file)[0])
        return [(page.imagelength, page.imagewidth) for page in pages]

    @property
    def facts(self) -> ImageFacts:
        """What the header says."""
        page = self._page
        colours, samples, _ = _COLOURS[page.photometric]
        if more := page.samplesperpixel - samples:
            is_alpha = more == 1 and page.extrasamples[-1:] in ((1,), (2,))
            colours += "+alpha" if is_alpha else f"+{more}"
        if len(self._pages) > 1:
            colours = f"{self.colours} channels"
        tag, band = page.tags.get(ORIENTATION), self._segment_size[0]
        rotated = tag is not None and tag.value not in (0, 1)
        sizes = [(one.imagelength, one.imagewidth) for one in _pages_of(self._file)]
        bits = 0 if self._is_mapped else page.samplesperpixel * page.bitspersample
        finest = self._finest
        step = finest.imagelength / self.size[0], finest.imagewidth / self.size[1]
        return ImageFacts(
            "TIFF", colours, page.bitspersample, rotated, band, self._lossy,
            page.sampleformat == 3, max(0, sizes.count(self.size) - len(self._pages)),
            decoding_bytes=-(-band * self._segment_size[1] * bits // 8),
            reference=tiff_georeference(self._file, finest).part((0, 0), step),
        )  # fmt: skip

    def check_complete(self) -> None:
        """Raises a ValueError if pixels that the header lists lie beyond the end of the file."""
        for page in self._pages:
            self._check_page(page)

    def _check_page(self, page: TiffPage) -> None:
        tall, wide = self._segment_size
        ends = [at + n for at, n in zip(page.dataoffsets, page.databytecounts, strict=False) if n]
        if self._is_mapped:
            ends = [page.dataoffsets[0] + page.nbytes]
        planes, _, height, width, _ = page.shaped
        num_segments = planes * -(-height // tall) * -(-width // wide)
        listed = min(len(page.dataoffsets), len(page.databytecounts))
        if not self._is_mapped and listed < num_segments:
            raise ValueError(f"it is cut off, its table lists {listed} of {num_segments} segments")
        if (short := max(ends, default=0) - self._file.filehandle.size) > 0:
            raise ValueError(f"it is cut off, {short} bytes short")

    def read(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of the image, (h, w, samples), colours first, white = ``peak``."""
        page = self._page
        self._check_claim((rows[1] - rows[0], cols[1] - cols[0]), "in a window")
        stored = self._mapped if self._is_mapped else self._decoded
        channels = [stored(one, rows, cols) for one in self._pages]
        pixels = np.concatenate(channels, axis=2) if len(channels) > 1 else channels[0]
        if pixels.dtype == np.bool_:
            pixels = pixels.astype(np.uint8)
        if pixels.dtype.kind == "f":
            if not np.isfinite(low := pixels.min()) or not np.isfinite(high := pixels.max()):
                raise ImageError(
                    "it has values that are not finite (NaN or infinite); write numbers from 0 "
                    "(black) to 1 (white) in their place"
                )
            if low < 0 or high > 1:
                raise ImageError(
                    f"its floats reach from {low} to {high}; scale them to 0 (black) to 1 (white)"
                )
        made: Pixels = pixels
        if page.photometric == PHOTOMETRIC.MINISWHITE:
            made = np.subtract(pixels.dtype.type(self._stored_peak), pixels)
        elif page.photometric == PHOTOMETRIC.SEPARATED:  # cyan, magenta, yellow and black
            peak = np.float32(self.peak)
            light = np.float32(1) - np.divide(pixels[:, :, :4], peak, dtype=np.float32)
            made = light[:, :, :3] * light[:, :, 3:]
            made *= peak
        elif page.photometric == PHOTOMETRIC.PALETTE:
            assert page.colormap is not None  # (3, entries)
            made = page.colormap.T[pixels[:, :, 0]]
        return made

    def _mapped(self, page: TiffPage, rows: Span, cols: Span) -> Pixels:
        """Returns a part of pixels that lie uncompressed in one piece."""
        short = page.dataoffsets[0] + page.nbytes - self._file.filehandle.size
        if short > 0:
            raise ValueError(f"it is cut off, {short} bytes short")
        stored = page.asarray(out="memmap", squeeze=False)  # (planes, 1, H, W, samples)
        part = stored[:, 0, slice(*rows), slice(*cols)]
        return _samples_last(part.astype(part.dtype.newbyteorder("=")))

    def _decoded(self, page: TiffPage, rows: Span, cols: Span) -> Pixels:
        """Returns a part of pixels that lie in tiles or strips."""
        assert page.dtype is not None
        planes, _, height, width, samples = page.shaped
        tall, wide = self._segment_size
        down, across = -(-height // tall), -(-width // wide)
        shape = (planes, rows[1] - rows[0], cols[1] - cols[0], samples)
        out: Pixels | None = None
        for plane, r, c in itertools.product(
            range(planes),
            range(rows[0] // tall, -(-rows[1] // tall)),
            range(cols[0] // wide, -(-cols[1] // wide)),
        ):
            index = (plane * down + r) * across + c
            tables = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader}
            segment, place, _ = page.decode(self._segment(page, index), index, **tables)
            if segment is not None:
                is_window = segment.shape == shape and place[2:4] == (rows[0], cols[0])
                if is_window and segment.dtype == page.dtype:  # not in the other byte order
                    return _samples_last(segment)  # the window is one segment: no copy
                if out is None:
                    out = np.full(shape, page.nodata, page.dtype)
                _, _, top, left, _ = place
                to = out[plane, max(0, top - rows[0]) :, max(0, left - cols[0]) :]
                part = segment[0, max(0, rows[0] - top) :, max(0, cols[0] - left) :]
                h, w = min(len(to), len(part)), min(to.shape[1], part.shape[1])
                to[:h, :w] = part[:h, :w]
                del segment, part  # before the next is decoded
        if out is None:  # all segments are left out of the file
            out = np.full(shape, page.nodata, page.dtype)
        return _samples_last(out)

    @property
    def _segment_size(self) -> Size:
        """Height and width of a tile or strip."""
        page = self._page
        if page.is_tiled:
            return page.tilelength, page.tilewidth
        return min(page.rowsperstrip, page.imagelength), page.imagewidth

    def _check_claim(self, size: Size, part: str) -> None:
        page = self._page
        bits = len(self._pages) * page.samplesperpixel * page.bitspersample
        check_claim(size, bits, self._max_pixels, part)

    def _segment(self, page: TiffPage, index: int) -> bytes | None:
        """Returns the bytes of a tile or strip; nothing if the file leaves it out."""
        handle = self._file.filehandle
        if index >= min(len(page.dataoffsets), len(page.databytecounts)):
            raise ValueError(f"it is cut off, its table does not list segment {index}")
        offset, num_bytes = page.dataoffsets[index], page.databytecounts[index]
        if num_bytes == 0:
            return None
        if (short := offset + num_bytes - handle.size) > 0:
            raise ValueError(f"it is cut off in segment {index}, {short} bytes short")
        handle.seek(offset)
        data: bytes = handle.read(num_bytes)
        return data


def _channel_pages(file: TiffFile) -> list[TiffPage]:
    """Returns the pages of the image: one, or one for each channel, of the first slice and time.

    ImageError: they lie in other files, too.
    """
    if file.is_ome or file.is_imagej:
        series = file.series[0]
        lengths = zip(series.axes, series.shape, strict=True)
        counts = {axis: length for axis, length in lengths if axis not in "YXS"}
        if counts.get("C", 1) > 1 and math.prod(counts.values()) == len(series.pages):
            places = np.arange(len(series.pages)).reshape([*counts.values()])
            index = tuple(slice(None) if axis == "C" else 0 for axis in counts)
            pages = [series.pages[place] for place in places[index].tolist()]
            if any(page is None or page.parent is not file for page in pages):
                raise ImageError("its channels lie in several files; write them into one")
            return [page.aspage() for page in pages]
    first, *others = _pages_of(file)
    largest = max(others, key=_num_pixels, default=first)
    return [largest if _num_pixels(largest) >= _THUMBNAIL * _num_pixels(first) else first]


def _pages_of(file: TiffFile) -> list[TiffPage]:
    return [page.aspage() for page in itertools.islice(file.pages, _MOST_PAGES)]


def _num_pixels(page: TiffPage) -> int:
    return page.imagelength * page.imagewidth


def _levels(file: TiffFile, finest: TiffPage) -> list[TiffPage]:
    """Returns the pages that show a page, each smaller than that before; it is the first.

    They lie beside it, or below it as in OME-TIFF. Labels and thumbnails, which are not in tiles or
    have another shape, are left out.
    """
    others, found = _pages_of(file), [finest]
    if finest.subifds:
        others = [page.aspage() for page in itertools.islice(finest.pages or (), _MOST_PAGES)]
    for page in sorted(others, key=lambda page: -page.imagewidth):
        if not 0 < page.imagewidth < found[-1].imagewidth:
            continue
        if any(getattr(page, name) != getattr(finest, name) for name in _ALIKE):
            continue
        height = finest.imagelength * page.imagewidth / finest.imagewidth
        if abs(height - page.imagelength) <= 2 + 0.01 * height:
            found.append(page)
    return found


def _check_readable(page: TiffPage) -> None:
    ycbcr = page.photometric == PHOTOMETRIC.YCBCR and page.compression not in JPEG
    if page.photometric not in _COLOURS or ycbcr:
        name = getattr(page.photometric, "name", page.photometric)
        raise ImageError(f"its colours are stored as {name}; convert it to RGB or grey")
    if page.dtype is None or page.sampleformat not in (1, 3) or 0 in page.shaped:
        raise ImageError(
            f"its pixels are {page.dtype or 'of an unknown type'}; convert them to unsigned 8- or "
            f"16-bit numbers"
        )
    if page.imagedepth != 1:
        raise ImageError("it is a volume; convert it to one file per slice")
    if page.is_tiled and page.tilelength * page.tilewidth < _MIN_TILE:
        raise ImageError(
            f"its tiles have {page.tilelength} x {page.tilewidth} pixels; save it with larger ones"
        )
    try:
        TIFF.DECOMPRESSORS[page.compression]
        TIFF.UNPREDICTORS[page.predictor]
    except KeyError as error:
        name = getattr(page.compression, "name", page.compression)
        raise ImageError(
            f"its compression is {name}, which imagecodecs cannot decode; save it with deflate "
            f"(zlib) or LZW compression"
        ) from error


def _samples_last(pixels: Pixels) -> Pixels:
    """Returns (planes, h, w, samples) as (h, w, all samples); one of the two counts is 1."""
    last: Pixels = pixels[0] if len(pixels) == 1 else pixels[..., 0].transpose(1, 2, 0)
    return last
