"""Reads a part of a TIFF file without decoding the rest.

    +----+----+----+----+
    |    |####|####|    |     # the tiles (or strips) that overlap the window are read and decoded
    +----+-##-+-##-+----+     uncompressed pixels in one piece are mapped into memory instead
    |    |####|####|    |
    +----+----+----+----+

The first page counts. tifffile decodes deflate (zlib), PackBits and no compression by itself;
others need the package imagecodecs. It selects segments only through zarr, a large dependency in
place of the twenty lines of ``_decoded``.
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import numpy as np
from tifffile import PHOTOMETRIC, TIFF, TiffFile, TiffPage

from hires.data.image_format import FORMATS, ImageError, ImageFile, Pixels, Size, Span
from hires.data.whole import open_whole

log = logging.getLogger(__name__)

COLOURS: dict[int, int] = {
    PHOTOMETRIC.MINISWHITE: 1,
    PHOTOMETRIC.MINISBLACK: 1,
    PHOTOMETRIC.RGB: 3,
    PHOTOMETRIC.PALETTE: 3,
    PHOTOMETRIC.SEPARATED: 3,
    PHOTOMETRIC.YCBCR: 3,  # only inside JPEG, whose decoder returns RGB
}
JPEG = (6, 7)

_warned: set[str] = set()


class CodecError(ImageError):
    """tifffile cannot decode the file by itself; Pillow may decode it as a whole."""


@FORMATS.register(".tiff")
@FORMATS.register(".tif")
def open_tiff(path: Path) -> ImageFile:
    """Opens a TIFF file; one that only Pillow can decode is read as a whole, with a warning."""
    try:
        return TiffImage(path)
    except CodecError as error:
        reason = error
    try:
        image = open_whole(path)
    except Exception as error:
        raise reason from error
    if str(reason) not in _warned:
        log.warning("%s is decoded as a whole, not only its window: %s", path, reason)
        _warned.add(str(reason))
    return image


class TiffImage:
    """The first page of an open TIFF file."""

    def __init__(self, path: Path) -> None:
        self._file = TiffFile(path)
        try:
            page = self._file.pages[0]
            assert isinstance(page, TiffPage)
            self._page = page
            _check_readable(page)
        except BaseException:
            self._file.close()
            raise
        self.size: Size = (page.imagelength, page.imagewidth)
        self.colours = COLOURS[page.photometric]
        self._stored_peak = 1.0 if page.sampleformat == 3 else float(2**page.bitspersample - 1)
        self.peak = 65535.0 if page.photometric == PHOTOMETRIC.PALETTE else self._stored_peak

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def read(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of the image, (h, w, samples), colours first, white = ``peak``."""
        page = self._page
        pixels = (self._mapped if page.is_memmappable else self._decoded)(rows, cols)
        if pixels.dtype == np.bool_:
            pixels = pixels.astype(np.uint8)
        if pixels.dtype.kind == "f":
            low, high = pixels.min(), pixels.max()
            if not (low >= 0 and high <= 1):  # also refuses not-a-number
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

    def _mapped(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of pixels that lie uncompressed in one piece."""
        page = self._page
        short = page.dataoffsets[0] + page.nbytes - self._file.filehandle.size
        if short > 0:
            raise ValueError(f"it is cut off, {short} bytes short")
        stored = page.asarray(out="memmap", squeeze=False)  # (planes, 1, H, W, samples)
        part = stored[:, 0, slice(*rows), slice(*cols)]
        return _samples_last(part.astype(part.dtype.newbyteorder("=")))

    def _decoded(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of pixels that lie in tiles or strips."""
        page = self._page
        assert page.dtype is not None
        planes, _, height, width, samples = page.shaped
        tall, wide = min(page.rowsperstrip, height), width
        if page.is_tiled:
            tall, wide = page.tilelength, page.tilewidth
        down, across = -(-height // tall), -(-width // wide)
        shape = (planes, rows[1] - rows[0], cols[1] - cols[0], samples)
        out = np.full(shape, page.nodata, page.dtype)  # a segment may be left out of the file
        for plane, r, c in itertools.product(
            range(planes),
            range(rows[0] // tall, -(-rows[1] // tall)),
            range(cols[0] // wide, -(-cols[1] // wide)),
        ):
            index = (plane * down + r) * across + c
            tables = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader}
            segment, place, _ = page.decode(self._segment(index), index, **tables)
            if segment is not None:
                _, _, top, left, _ = place
                to = out[plane, max(0, top - rows[0]) :, max(0, left - cols[0]) :]
                part = segment[0, max(0, rows[0] - top) :, max(0, cols[0] - left) :]
                h, w = min(len(to), len(part)), min(to.shape[1], part.shape[1])
                to[:h, :w] = part[:h, :w]
        return _samples_last(out)

    def _segment(self, index: int) -> bytes | None:
        """Returns the bytes of a tile or strip; nothing if the file leaves it out."""
        page, handle = self._page, self._file.filehandle
        if index >= min(len(page.dataoffsets), len(page.databytecounts)):
            raise ValueError(f"it is cut off, its table does not list segment {index}")
        offset, num_bytes = page.dataoffsets[index], page.databytecounts[index]
        if num_bytes == 0:
            return None
        handle.seek(offset)
        data = handle.read(num_bytes)
        if short := num_bytes - len(data):
            raise ValueError(f"it is cut off in segment {index}, {short} bytes short")
        return data


def _check_readable(page: TiffPage) -> None:
    ycbcr = page.photometric == PHOTOMETRIC.YCBCR and page.compression not in JPEG
    if page.photometric not in COLOURS or ycbcr:
        name = getattr(page.photometric, "name", page.photometric)
        raise ImageError(f"its colours are stored as {name}; convert it to RGB or grey")
    if page.dtype is None or page.sampleformat not in (1, 3) or 0 in page.shaped:
        raise ImageError(
            f"its pixels are {page.dtype or 'of an unknown type'}; convert them to unsigned 8- or "
            f"16-bit numbers"
        )
    if page.imagedepth != 1:
        raise ImageError("it is a volume; convert it to one file per slice")
    try:
        TIFF.DECOMPRESSORS[page.compression]
        TIFF.UNPREDICTORS[page.predictor]
    except KeyError as error:
        name = getattr(page.compression, "name", page.compression)
        deep = page.bitspersample > 8  # Pillow would drop bits of these silently
        raise (ImageError if deep else CodecError)(
            f"its compression is {name}, which needs `pip install imagecodecs`; or save it with "
            f"deflate (zlib) compression"
        ) from error


def _samples_last(pixels: Pixels) -> Pixels:
    """Returns (planes, h, w, samples) as (h, w, all samples); one of the two counts is 1."""
    last: Pixels = pixels[0] if len(pixels) == 1 else pixels[..., 0].transpose(1, 2, 0)
    return last
