"""Computes which rows and columns a tile owns, which it needs, and which tile sends them.

A map of length L on P tiles is split the canonical way, ``L // P`` plus one for the first
``L % P``: a function of (L, P) alone, so the operands of an addition always align.

    output rows on 3 tiles     | 0 1 2 3 | 4 5 6 | 7 8 9 |
    a 3-row kernel needs       [0 ...   4]
    of the input rows                  [3 ...   7]          need minus own = halo
                                              [6 ...    9]

An axis maps an interval of output rows to the input rows that it depends on. Interpolation, padding
by reflection and adaptive pools mix rows with weights (taps), along each dim apart.

Source:
    ATen/native/UpSample.h and cpu/UpSampleKernel.cpp (interpolation), PaddingKernel.cpp (pads),
    AdaptivePooling.h (bins), with their special cases.
    The interval arithmetic follows Dryden et al., "Improving strong-scaling of CNN training by
    exploiting finer-grained parallelism", IPDPS 2019, for any kernel, stride, padding, dilation.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hires.plan.graph import Rect

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
Parts = tuple[Intervals, Intervals]
"""Rows and columns of which rectangles of a map are made: each with each."""
CIRCULAR = "circular"
"""Kind of an axis whose rows go on at the other end of the map."""


def split(length: int, parts: int, index: int) -> Interval:
    """Returns the interval of ``length`` indices that part ``index`` of ``parts`` owns."""
    size, extra = divmod(length, parts)
    first = index * size + min(index, extra)
    return first, first + size + (index < extra)


@functools.lru_cache(maxsize=2**10)
def split_all(length: int, parts: int) -> tuple[Interval, ...]:
    """Returns the intervals of all parts, in order."""
    return tuple(split(length, parts, index) for index in range(parts))


def own_rect(size: Sequence[int], grid: Sequence[int], tile: int) -> Rect:
    """Returns the rectangle of an H x W map that a tile owns; tiles count row by row."""
    row, col = divmod(tile, grid[1])
    return split(size[0], grid[0], row) + split(size[1], grid[1], col)


def own_rects(size: Sequence[int], grid: Sequence[int]) -> list[Rect]:
    """Returns the rectangles of an H x W map that all tiles own, in their order."""
    rows, cols = split_all(size[0], grid[0]), split_all(size[1], grid[1])
    return [row + col for row, col in itertools.product(rows, cols)]


def area(rect: Rect) -> int:
    """Returns the pixels of a rectangle."""
    return max(0, rect[1] - rect[0]) * max(0, rect[3] - rect[2])


def is_empty(rect: Rect) -> bool:
    """Whether a rectangle holds no pixel."""
    return rect[1] <= rect[0] or rect[3] <= rect[2]


def intersect(a: Rect, b: Rect) -> Rect:
    """Returns the common rectangle of two, which may be empty."""
    return max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])


def inside(inner: Rect, outer: Rect) -> bool:
    """Whether a rectangle lies in another, as an empty one does."""
    if is_empty(inner):
        return True
    rows = outer[0] <= inner[0] and inner[1] <= outer[1]
    return rows and outer[2] <= inner[2] and inner[3] <= outer[3]


def cover(a: Rect, b: Rect) -> Rect:
    """Returns the smallest rectangle that holds both; an empty one adds nothing."""
    if is_empty(a) or is_empty(b):
        return b if is_empty(a) else a
    return min(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), max(a[3], b[3])


@dataclass(frozen=True)
class Axis:
    """The dependence of one dim of an output on the same dim of the input.

    ``kind`` is ``window`` (convolution, pool, pad, crop), ``transposed`` (transposed convolution),
    ``shuffle`` (PixelShuffle), ``circular`` (roll, circular pad) or one of ``RESAMPLINGS``
    (interpolation, adaptive pool, other pads).
    """

    kind: str
    size_in: int
    size_out: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    """Rows before the first input row; negative for a crop."""
    dilation: int = 1
    scale: float = 1.0
    """Input rows per output row, for interpolation."""

    def reach(self, out: Interval) -> Interval:
        """Returns the input interval of a non-empty output interval, also beyond the image."""
        first, last = out[0], out[1] - 1
        extent = self.dilation * (self.kernel - 1)
        if self.kind == "window":
            low = first * self.stride - self.padding
            return low, last * self.stride - self.padding + extent + 1
        if self.kind == "transposed":
            low = math.ceil((first + self.padding - extent) / self.stride)
            return low, (last + self.padding) // self.stride + 1
        if self.kind == "shuffle":
            return first // self.stride, last // self.stride + 1
        if self.kind == CIRCULAR:
            return first - self.padding, last + 1 - self.padding
        ends = range(first, last + 1) if self.kind == TURNING else (first, last)
        rows = [row for index in ends for row, _ in self.taps(index)]
        return min(rows), max(rows) + 1

    def taps(self, out: int) -> Taps:
        """Returns the input rows that a resampled row mixes, in the image, and their weights."""
        offset = self.padding if self.kind in PADS else self.scale
        return RESAMPLINGS[self.kind](out, self.size_in, self.size_out, offset)

    def need(self, out: Interval) -> Interval:
        """Returns the input interval inside the image that an output interval depends on."""
        if out[1] <= out[0]:
            return 0, 0
        if self.kind == CIRCULAR:
            return _hull(self.needs(out))
        low, high = self.reach(out)
        low = min(max(low, 0), self.size_in)
        return low, max(low, min(high, self.size_in))

    def needs(self, out: Interval) -> Intervals:
        """Returns that interval without what lies between its parts.

        Rows that go on at the other end of the map have two:

            | x x . . . . . . x |       rows -1 to 2 of 9
        """
        if self.kind != CIRCULAR or out[1] <= out[0]:
            return (self.need(out),)
        low, high = self.reach(out)
        if high - low >= self.size_in:
            return ((0, self.size_in),)
        low, high = low % self.size_in, low % self.size_in + high - low
        if high <= self.size_in:
            return ((low, high),)
        return (0, high - self.size_in), (low, self.size_in)


Axes = tuple[Axis, Axis]


def need_of(axes: Axes, out: Rect) -> Rect:
    """Returns the input rectangle inside the image that an output rectangle depends on."""
    return rect_around(parts_of(axes, out))


def parts_of(axes: Axes, out: Rect) -> Parts:
    """Returns the parts of :func:`need_of`, which are several where rows or columns turn round."""
    parts = axes[0].needs(out[:2]), axes[1].needs(out[2:])
    return (((0, 0),), ((0, 0),)) if _are_empty(parts) else parts


def rect_around(parts: Parts) -> Rect:
    """Returns the smallest rectangle that holds all parts."""
    return _hull(parts[0]) + _hull(parts[1])


def _hull(parts: Intervals) -> Interval:
    return parts[0][0], parts[-1][1]


def cover_parts(a: Parts, b: Parts) -> Parts:
    """Returns parts that hold both; single ones are filled up between as by :func:`cover`."""
    if _are_empty(a) or _are_empty(b):
        return b if _are_empty(a) else a
    return _joined(a[0], b[0]), _joined(a[1], b[1])


def rects_of(parts: Parts) -> list[Rect]:
    """Returns the rectangles that are made of parts."""
    return [rows + cols for rows, cols in itertools.product(*parts)]


def _are_empty(parts: Parts) -> bool:
    return all(map(is_empty, rects_of(parts)))


def _joined(a: Intervals, b: Intervals) -> Intervals:
    if len(a) == len(b) == 1:
        return ((min(a[0][0], b[0][0]), max(a[0][1], b[0][1])),)
    found: list[Interval] = []
    for low, high in sorted(a + b):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


class Piece(NamedTuple):
    """A rectangle of a map that one tile owns and another one needs."""

    source: int
    target: int
    rect: Rect


def window_pieces(axes: Axes, grid: Sequence[int]) -> list[Piece]:
    """Returns what tiles send each other before one operation."""
    needs = [parts_of(axes, rect) for rect in own_rects([axis.size_out for axis in axes], grid)]
    return pieces_between([axis.size_in for axis in axes], grid, needs)


def pieces_between(size: Sequence[int], grid: Sequence[int], needs: Sequence[Parts]) -> list[Piece]:
    """Returns what gives every tile the parts that it needs of a map, and does not own."""
    rects = [(tile, rect) for tile, parts in enumerate(needs) for rect in rects_of(parts)]
    pieces = pieces_of_map(size, grid, [rect for _, rect in rects])
    found = (Piece(source, rects[index][0], rect) for source, index, rect in pieces)
    return [piece for piece in found if piece.source != piece.target]


def pieces_of_map(size: Sequence[int], grid: Sequence[int], needs: Sequence[Rect]) -> list[Piece]:
    """Returns the pieces of a map on a grid of which some rectangles consist.

    Their target is the index of the rectangle; they come by rectangle, then by tile.
    """
    pieces = []
    for target, need in enumerate(needs):
        rows = _owners(need[:2], size[0], grid[0])
        cols = _owners(need[2:], size[1], grid[1])
        for (row, r0, r1), (col, c0, c1) in itertools.product(rows, cols):
            pieces.append(Piece(row * grid[1] + col, target, (r0, r1, c0, c1)))
    return pieces


@functools.lru_cache(maxsize=2**14)  # a row of tiles needs the same rows
def _owners(interval: Interval, length: int, parts: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the (part, first, end) of which an interval of a split length consists."""
    owned = split_all(length, parts)
    clipped = ((max(interval[0], low), min(interval[1], high)) for low, high in owned)
    return tuple((part, low, high) for part, (low, high) in enumerate(clipped) if low < high)


Taps = list[tuple[int, float]]
Resampling = Callable[[int, int, int, float], Taps]
"""(output row, rows in, rows out, input rows per output row, or rows before the first) -> taps."""


def _nearest(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    # Single precision decides on which side of a boundary a nearest neighbour falls.
    if size_out in (size_in, 2 * size_in):
        return [(out * size_in // size_out, 1.0)]
    return [(min(int(_single(out * _single(scale))), size_in - 1), 1.0)]


def _between(centre: float, out: int, size_in: int, size_out: int) -> Taps:
    if size_out == size_in:
        return [(out, 1.0)]
    low = min(int(centre), size_in - 1)
    weight = min(max(centre - low, 0.0), 1.0)
    return [(low, 1.0 - weight), (min(low + 1, size_in - 1), weight)]


def _four(centre: float, size_in: int) -> Taps:
    low = min(math.floor(centre), size_in - 1)
    t = min(max(centre - low, 0.0), 1.0)
    weights = [_keys(distance, -0.75) for distance in (t + 1, t, 1 - t, 2 - t)]
    rows = [min(max(low + k, 0), size_in - 1) for k in (-1, 0, 1, 2)]
    return list(zip(rows, weights, strict=True))


def _keys(x: float, a: float) -> float:
    # The convolution kernel of Keys, "Cubic convolution interpolation", 1981.
    x = abs(x)
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def _smooth(support: float, weigh: Callable[[float], float]) -> Resampling:
    # With antialiasing the kernel is as wide as the output row, and its weights add up to 1.
    def taps(out: int, size_in: int, size_out: int, scale: float) -> Taps:
        if size_out == size_in:
            return [(out, 1.0)]
        wider = max(scale, 1.0)
        centre = scale * (out + 0.5)
        low = max(int(centre - support * wider + 0.5), 0)
        high = min(int(centre + support * wider + 0.5), size_in)
        weights = [weigh((row - centre + 0.5) / wider) for row in range(low, high)]
        total = sum(weights)
        return [(low + k, weight / total) for k, weight in enumerate(weights)]

    return taps


def _bin(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    low, high = out * size_in // size_out, -(-(out + 1) * size_in // size_out)
    return [(row, 1 / (high - low)) for row in range(low, high)]


def _reflect(out: int, size_in: int, size_out: int, before: float) -> Taps:
    row = abs(out - int(before))
    return [(2 * (size_in - 1) - row if row >= size_in else row, 1.0)]


def _single(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


RESAMPLINGS: dict[str, Resampling] = {
    "nearest": _nearest,
    "nearest_exact": lambda o, n, _, s: [(min(int(_single((o + 0.5) * _single(s))), n - 1), 1.0)],
    "linear": lambda o, n, to, s: _between(max((o + 0.5) * s - 0.5, 0.0), o, n, to),
    "linear_corners": lambda o, n, to, s: _between(o * s, o, n, to),
    "cubic": lambda o, n, _, s: _four((o + 0.5) * s - 0.5, n),
    "cubic_corners": lambda o, n, _, s: _four(o * s, n),
    "linear_smooth": _smooth(1.0, lambda x: max(0.0, 1.0 - abs(x))),
    "cubic_smooth": _smooth(2.0, lambda x: _keys(x, -0.5)),
    "bins": _bin,
    "reflect": _reflect,
    "replicate": lambda o, n, _, before: [(min(max(o - int(before), 0), n - 1), 1.0)],
    "copies": lambda o, n, to, _: [(o * n // to, 1.0)],
}
"""Kind of an axis -> the taps of its output rows."""
PADS = ("reflect", "replicate")
"""Kinds that count the rows before the first input row instead of a scale."""
TURNING = "reflect"
"""Kind whose taps do not follow the order of the output rows."""
