"""Divides the convolution of a tile into main pixels and strips; ``strips`` computes it.

Each dim is divided alone. For a kernel of 3 and stride 1:

    pixels of the image   . | # # # # # # | .     #  main pixels, .  missing: low edge, high edge
    convolved at once     0 | # # # # # # | 0     0  zeros in place of the missing pixels
    outputs                 | B i i i i B |       B  border: reached by missing pixels, i  inner
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hires.plan.graph import Rect
from hires.plan.halos import BORDER_SHARE
from hires.plan.tiling import Axes, Axis, Interval, is_empty


@dataclass(frozen=True)
class Strip:
    """A convolution with some taps of the kernel, from a thin window to some outputs."""

    out: Rect
    window: Rect
    pixels: Rect
    """The pixels of its window that count; the others are zero."""
    taps: Rect
    """Rows and columns of the kernel."""


@dataclass(frozen=True)
class Strips:
    """The division of one tile's convolution; rectangles are in pixels of the whole map."""

    held: Rect
    main: Rect
    """The part of the held pixels that is convolved at once."""
    padding: list[int]
    """Zeros around it."""
    out: Rect
    borders: list[Strip]
    """Forward: the outputs that missing pixels reach."""
    bands: list[Strip]
    """Backward: the missing pixels, each in one band."""


def strips_of(axes: Axes, held: Rect, out: Rect, overlap: str) -> Strips | None:
    """Returns the division of a tile's convolution, or None if it is computed as a whole.

    Args:
        axes: rows and columns of the convolution.
        held: rectangle of the input that the tile holds.
        out: rectangle of the output that it makes; not empty.
        overlap: ``off`` (never), ``on`` (where possible), ``auto`` (where it also saves time).
    """
    if overlap == "off" or is_empty(held):
        return None
    rows = _divide(axes[0], (held[0], held[1]), (out[0], out[1]))
    cols = _divide(axes[1], (held[2], held[3]), (out[2], out[3]))
    if rows is None or cols is None:
        return None
    borders = _borders(axes, rows, cols, out)
    again = sum(_area(strip.out) for strip in borders)
    if again > (BORDER_SHARE if overlap == "auto" else 1) * _area(out):
        return None
    main = rows.main + cols.main
    padding = [rows.padding, cols.padding]
    return Strips(held, main, padding, out, borders, _bands(axes, rows, cols, out))


@dataclass(frozen=True)
class _Edge:
    """The missing pixels at one end of one dim."""

    pixels: Interval
    out: Interval
    taps: Interval


@dataclass(frozen=True)
class _Division:
    """One dim of a tile:  low | main pixels, padded with zeros on both sides | high."""

    main: Interval
    padding: int
    low: _Edge
    high: _Edge
    inner: Interval
    """The outputs that no missing pixel reaches."""


def _divide(axis: Axis, held: Interval, out: Interval) -> _Division | None:
    """Returns the division of a dim; None if no padding fits or each output has missing pixels."""
    fitted = _fit(axis, held, out)
    if fitted is None:
        return None
    main, padding = fitted
    # Output row o reads the rows o*stride - padding + dilation*tap for each tap of the kernel, so
    # rows before main[0] reach the outputs a to until, through the taps 0 to before; rows from
    # main[1] on reach the outputs since to b, through the taps after to kernel.
    (low, high), (a, b) = axis.need(out), out
    stride, extent = axis.stride, axis.dilation * (axis.kernel - 1)
    first, last = a * stride - axis.padding, (b - 1) * stride - axis.padding
    until = _limited(math.ceil((main[0] + axis.padding) / stride), a, b)
    since = _limited(math.ceil((main[1] + axis.padding - extent) / stride), a, b)
    before = _limited(math.ceil((main[0] - first) / axis.dilation), 0, axis.kernel)
    after = _limited(math.ceil((main[1] - last) / axis.dilation), 0, axis.kernel)
    until = until if low < main[0] else a
    since = since if main[1] < high else b
    if since <= until:
        return None
    return _Division(
        main,
        padding,
        _Edge((low, main[0]), (a, until), (0, before)),
        _Edge((main[1], high), (since, b), (after, axis.kernel)),
        (until, since),
    )


def _fit(axis: Axis, held: Interval, out: Interval) -> tuple[Interval, int] | None:
    """Returns the longest part of the held rows, and its padding, that makes just the wanted rows.

    torch pads both sides by one number, and the first window must begin where that of the first
    wanted row does. Rows are dropped at both ends, as few as possible, until such a padding exists.
    """
    extent = axis.dilation * (axis.kernel - 1)
    start = out[0] * axis.stride - axis.padding
    first = max(held[0], start)
    slack = extent + axis.stride
    for dropped in range(2 * slack + 1):
        for above in range(max(0, dropped - slack), min(dropped, slack) + 1):
            main = first + above, held[1] - (dropped - above)
            padding = main[0] - start
            free = main[1] - main[0] + 2 * padding - extent - 1
            if main[1] > main[0] and free >= 0 and free // axis.stride + 1 == out[1] - out[0]:
                return main, padding
    return None


def _bands(axes: Axes, rows: _Division, cols: _Division, out: Rect) -> list[Strip]:
    """Returns the bands of missing pixels: above and below with the corners, left and right."""
    all_rows, all_cols = ((0, axis.kernel) for axis in axes)
    wide = (cols.low.pixels[0], cols.high.pixels[1])
    bands = [
        (edge.out + out[2:], edge.pixels + wide, edge.taps + all_cols)
        for edge in (rows.low, rows.high)
    ] + [
        (out[:2] + edge.out, rows.main + edge.pixels, all_rows + edge.taps)
        for edge in (cols.low, cols.high)
    ]
    return [
        Strip(to, _reach(axes, to, taps), pixels, taps)
        for to, pixels, taps in bands
        if not (is_empty(to) or is_empty(pixels) or is_empty(taps))
    ]


def _borders(axes: Axes, rows: _Division, cols: _Division, out: Rect) -> list[Strip]:
    """Returns the outputs that missing pixels reach: a frame of up to four rectangles."""
    frame = [edge.out + out[2:] for edge in (rows.low, rows.high)]
    frame += [rows.inner + edge.out for edge in (cols.low, cols.high)]
    taps = (0, axes[0].kernel, 0, axes[1].kernel)
    windows = [(to, _reach(axes, to, taps)) for to in frame if not is_empty(to)]
    return [Strip(to, window, window, taps) for to, window in windows]


def _reach(axes: Axes, out: Rect, taps: Rect) -> Rect:
    """Returns the pixels under some taps for some outputs, also beyond the image."""
    rect: list[int] = []
    for dim, axis in enumerate(axes):
        a, b = out[2 * dim : 2 * dim + 2]
        first, end = taps[2 * dim : 2 * dim + 2]
        low = a * axis.stride - axis.padding + axis.dilation * first
        rect += [low, low + (b - 1 - a) * axis.stride + axis.dilation * (end - 1 - first) + 1]
    return rect[0], rect[1], rect[2], rect[3]


def _limited(number: int, low: int, high: int) -> int:
    return min(max(number, low), high)


def _area(rect: Rect) -> int:
    return max(0, rect[1] - rect[0]) * max(0, rect[3] - rect[2])
