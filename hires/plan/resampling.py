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
