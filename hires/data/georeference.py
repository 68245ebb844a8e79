"""Says where the pixels of an image lie: on the ground (GeoTIFF), and how large they are.

    image   100 x 100 pixels of 10 m          map of twice as many pixels:  5 m, the same corner
    patch   at row 40, column 60 of it        its corner lies 400 m below and 600 m to the right

Readers place a map on its image by these numbers.

Source:
    OGC 19-008r4, "GeoTIFF Standard", 1.1, annex B (transformation) and 7.2 (raster type).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

SCALE, TIEPOINT, MATRIX, KEYS, DOUBLES, TEXT = 33550, 33922, 34264, 34735, 34736, 34737
"""Tags of GeoTIFF."""
_RASTER_TYPE, _POINT = 1025, 2
"""Key and value: coordinates are those of the centre of a pixel, not of its corner."""
_CODES = (3072, 2048)
"""Keys of the EPSG code: of projected, and of geographic coordinates."""
_MAX_CODE = 32766
_MICROMETRES = {
    "nm": 1e-3, "um": 1.0, "micron": 1.0, "microns": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6,
    "in": 25400.0, "inch": 25400.0,
}  # fmt: skip
_SMALLEST, _LARGEST = 1e-4, 1e10
"""Pixels from an ångström to ten kilometres; others are damage, and a TIFF could not name them."""
_TIFF_UNITS = {2: "inch", 3: "cm", 4: "mm", 5: "um"}

Pair = tuple[float, float]
"""Of rows and of columns."""


@dataclass(frozen=True)
class Georeference:
    """Where the pixels of an image lie, as far as its file says it."""

    pixel_um: Pair | None = None
    """Height and width of a pixel in micrometres."""
    corner: Pair = (0.0, 0.0)
    """Row and column, in pixels of this size, of the image that it is a part of."""
    tags: Mapping[int, Any] = field(default_factory=dict)
    """Of GeoTIFF: number -> value."""

    def part(self, corner: Pair, step: Pair = (1.0, 1.0)) -> Georeference:
        """Returns that of a part which begins at a row and column, with other pixels.

        ``step`` is how many pixels of this image one of the part takes, down and across.
        """
        if (corner, step) == ((0, 0), (1, 1)):
            return self
        (row, col), (down, right) = corner, step
        # A coordinate i of this image is (i + half - col) / right - half of the part.
        half, tags = 0.5 * self._is_point, dict(self.tags)
        if SCALE in tags:
            across, along, *others = tags[SCALE]
            tags[SCALE] = (across * right, along * down, *others)
        if TIEPOINT in tags:
            points = np.reshape(tags[TIEPOINT], (-1, 6))
            points[:, 0] = (points[:, 0] + half - col) / right - half
            points[:, 1] = (points[:, 1] + half - row) / down - half
            tags[TIEPOINT] = tuple(points.ravel().tolist())
        if MATRIX in tags:
            matrix = np.reshape(tags[MATRIX], (4, 4))
            matrix[:, 3] += matrix[:, 0] * (col + half * right - half)
            matrix[:, 3] += matrix[:, 1] * (row + half * down - half)
            matrix[:, :2] *= right, down
            tags[MATRIX] = tuple(matrix.ravel().tolist())
        pixel = self.pixel_um and (self.pixel_um[0] * down, self.pixel_um[1] * right)
        place = (self.corner[0] + row) / down, (self.corner[1] + col) / right
        return replace(self, pixel_um=pixel, corner=place, tags=tags)

    @property
    def affine(self) -> list[float] | None:
        """The coordinates of the corner of a pixel: x = a col + b row + c, y = d col + e row + f.

        They are [a, b, c, d, e, f]; None: the file has none, or only points.
        """
        if MATRIX in self.tags:
            a, b, _, c, d, e, _, f = self.tags[MATRIX][:8]
        elif {SCALE, TIEPOINT} <= self.tags.keys():
            (a, e), (i, j, _, x, y, _) = self.tags[SCALE][:2], self.tags[TIEPOINT][:6]
            b, c, d, e, f = 0.0, x - i * a, 0.0, -e, y + j * e
        else:
            return None
        half = 0.5 * self._is_point
        return [a, b, c - half * (a + b), d, e, f - half * (d + e)]

    @property
    def epsg(self) -> int | None:
        """The EPSG code of the coordinates."""
        codes = [self._keys[key] for key in _CODES if 0 < self._keys.get(key, 0) <= _MAX_CODE]
        return next(iter(codes), None)

    @property
    def _keys(self) -> dict[int, int]:
        # Those whose value stands in the directory itself.
        lines = np.reshape(self.tags.get(KEYS, ()), (-1, 4)).tolist()[1:]
        return {key: value for key, where, _, value in lines if not where}

    @property
    def _is_point(self) -> bool:
        return self._keys.get(_RASTER_TYPE) == _POINT


def pixel_size(rows: Any, columns: Any, unit: str) -> Pair | None:
    """Returns height and width of a pixel in micrometres; None: they are no sizes."""
    each = _MICROMETRES.get(unit.replace("\\u00B5", "u").replace("µ", "u").replace("μ", "u"))
    try:
        size = float(rows) * (each or 0), float(columns) * (each or 0)
    except (TypeError, ValueError):
        return None
    return size if min(size) >= _SMALLEST and max(size) <= _LARGEST else None


def tiff_georeference(file: Any, page: Any) -> Georeference:
    """Returns where the pixels of a page of an open ``tifffile.TiffFile`` lie."""
    tags: dict[int, Any] = {}
    for number, length in ((SCALE, 3), (TIEPOINT, 6), (MATRIX, 16), (KEYS, 4), (DOUBLES, 1)):
        values = np.ravel(page.tags.valueof(number, default=()))
        is_whole = len(values) % length == 0 < len(values) and values.dtype.kind in "uif"
        if number in (SCALE, MATRIX):
            is_whole &= len(values) == length
        # Damaged ones could not be written.
        if is_whole and np.isfinite(values).all() and (number != KEYS or values.max() < 2**16):
            tags[number] = tuple(values.tolist())
    if isinstance(text := page.tags.valueof(TEXT), str):
        tags[TEXT] = text.encode("ascii", "replace")
    return Georeference(_tiff_pixel(file, page), tags=tags)


def _tiff_pixel(file: Any, page: Any) -> Pair | None:
    if file.is_ome:
        [pixels] = re.findall(r"<(?:\w+:)?Pixels\s[^>]*>", file.ome_metadata or "")[:1] or [""]
        facts = dict(re.findall(r"PhysicalSize(\w+)\s*=\s*[\"']([^\"']*)", pixels))
        units = facts.get("YUnit", "um"), facts.get("XUnit", "um")
        down, across = (pixel_size(facts.get(a), 1, u) for a, u in zip("YX", units, strict=True))
        return (down[0], across[0]) if down and across else None
    if mpp := re.search(r"\bMPP\s*=\s*([\d.]+)", page.description) if file.is_svs else None:
        return pixel_size(mpp[1], mpp[1], "um")
    if not {282, 283} <= {tag.code for tag in page.tags}:
        return None
    unit = _TIFF_UNITS.get(page.resolutionunit, "")
    if file.is_imagej:
        unit = str((file.imagej_metadata or {}).get("unit") or unit)
    across, down = page.resolution
    return pixel_size(1 / down, 1 / across, unit) if min(across, down) > 0 else None
