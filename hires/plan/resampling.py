r"""Lists the input rows that one row of a resampled map mixes, and their weights.

Interpolation, padding by reflection and adaptive pools are one computation along each dim, apart:

    output row         o
                     / | \           taps: [(row, weight), ...], rows inside the image
    input rows     r  r+1  r+2

Source:
    ATen/native/UpSample.h and cpu/UpSampleKernel.cpp (interpolation), PaddingKernel.cpp (pads),
    AdaptivePooling.h (bins), with their special cases.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

Taps = list[tuple[int, float]]
"""(input row, weight)."""
Resampling = Callable[[int, int, int, float], Taps]
"""(output row, rows in, rows out, input rows per output row, or rows before the first) -> taps."""


def _nearest(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    # Single precision decides on which side of a boundary a nearest neighbour falls.
    if size_out in (size_in, 2 * size_in):
        return [(out * size_in // size_out, 1.0)]
    return [(min(int(_single(out * _single(scale))), size_in - 1), 1.0)]


def _nearest_exact(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    return [(min(int(_single((out + 0.5) * _single(scale))), size_in - 1), 1.0)]


def _linear(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    return _between(max((out + 0.5) * scale - 0.5, 0.0), out, size_in, size_out)


def _linear_corners(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    return _between(out * scale, out, size_in, size_out)


def _between(centre: float, out: int, size_in: int, size_out: int) -> Taps:
    if size_out == size_in:
        return [(out, 1.0)]
    low = min(int(centre), size_in - 1)
    weight = min(max(centre - low, 0.0), 1.0)
    return [(low, 1.0 - weight), (min(low + 1, size_in - 1), weight)]


def _cubic(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    return _four((out + 0.5) * scale - 0.5, size_in)


def _cubic_corners(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    return _four(out * scale, size_in)


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


def _linear_smooth(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    return _smooth(out, size_in, size_out, scale, 1.0, lambda x: max(0.0, 1.0 - abs(x)))


def _cubic_smooth(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    return _smooth(out, size_in, size_out, scale, 2.0, lambda x: _keys(x, -0.5))


def _smooth(
    out: int,
    size_in: int,
    size_out: int,
    scale: float,
    support: float,
    weigh: Callable[[float], float],
) -> Taps:
    # With antialiasing the kernel is as wide as the output row, and its weights add up to 1.
    if size_out == size_in:
        return [(out, 1.0)]
    wider = max(scale, 1.0)
    centre = scale * (out + 0.5)
    low = max(int(centre - support * wider + 0.5), 0)
    high = min(int(centre + support * wider + 0.5), size_in)
    weights = [weigh((row - centre + 0.5) / wider) for row in range(low, high)]
    total = sum(weights)
    return [(low + k, weight / total) for k, weight in enumerate(weights)]


def _bin(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    low, high = out * size_in // size_out, -(-(out + 1) * size_in // size_out)
    return [(row, 1 / (high - low)) for row in range(low, high)]


def _reflect(out: int, size_in: int, size_out: int, before: float) -> Taps:
    row = abs(out - int(before))
    return [(2 * (size_in - 1) - row if row >= size_in else row, 1.0)]


def _replicate(out: int, size_in: int, size_out: int, before: float) -> Taps:
    return [(min(max(out - int(before), 0), size_in - 1), 1.0)]


def _copies(out: int, size_in: int, size_out: int, scale: float) -> Taps:
    return [(out * size_in // size_out, 1.0)]


RESAMPLINGS: dict[str, Resampling] = {
    "nearest": _nearest,
    "nearest_exact": _nearest_exact,
    "linear": _linear,
    "linear_corners": _linear_corners,
    "cubic": _cubic,
    "cubic_corners": _cubic_corners,
    "linear_smooth": _linear_smooth,
    "cubic_smooth": _cubic_smooth,
    "bins": _bin,
    "reflect": _reflect,
    "replicate": _replicate,
    "copies": _copies,
}
"""Kind of an axis -> the taps of its output rows."""
PADS = ("reflect", "replicate")
"""Kinds that count the rows before the first input row instead of a scale."""
TURNING = "reflect"
"""Kind whose taps do not follow the order of the output rows."""


def _single(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
