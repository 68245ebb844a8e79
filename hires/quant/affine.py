r"""Maps real numbers to 8-bit integers and back (equations 2.1 to 2.3 of the thesis).

    s = (2^b - 1) / (beta - alpha)                                       (2.1)
    z = -round(alpha * s) - 2^(b-1)                                      (2.2)
    x_q = clip(round(x * s + z), -2^(b-1), 2^(b-1) - 1)                  (2.3)

(2.2) is printed there as -round(alpha * s - 2^b - 1), which maps alpha to neither end of the range.
``scale`` is 1 / s here, the distance of two neighbouring integers in real numbers, as libraries and
files have it:

    real      alpha ........ 0 ........ beta
    signed    -128 ......... z ......... 127        x = (x_q - z) * scale
    unsigned     0 ...... z + 128 ...... 255        the same steps, counted from alpha

Activations are unsigned, as oneDNN multiplies u8 by s8; every integer is 128 above its signed one,
so differences to the zero point are the same. Ranges contain 0: padding is exact. Weights are
signed and symmetric, z = 0, with a scale for each output channel: from -127 on, or in 7 bits
(``quant.weights=int7``) from -63 on.

Source:
    Gulhane, "Accelerated and memory-efficient distributed deep learning", thesis, section 2.3.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hires.core.config.precision_config import INT7, INT8

BITS = 8
LAST = 255
"""The largest unsigned integer."""
LARGEST = {INT8: 127, INT7: 63}
"""``quant.weights`` -> the largest integer of a weight; -128 would make the range uneven. Of 7 bits
the sum of two products is below 2**15 (:mod:`hires.quant.int8_kernels`)."""
MOST_PRODUCTS = (2**31 - 1) // (LAST * LARGEST[INT8])
"""Products of an activation and a weight of which 32 bits hold any sum."""
FACTOR_LIMIT = 2.0**97
"""Of factors and offsets of integers: times any sum of 32 bits they are numbers of fp32."""


class Affine(NamedTuple):
    """How a tensor's unsigned integers stand for real numbers: x = (x_q - zero_point) * scale."""

    scale: float
    zero_point: int

    def quantized(self, x: float) -> int:
        """Returns the integer that is nearest to a real number, within the range."""
        steps = min(max(x / self.scale, -LAST), LAST)  # of an infinite number, too
        return min(max(round(steps) + self.zero_point, 0), LAST)

    def real(self, number: int) -> float:
        """Returns the real number of an integer."""
        return (number - self.zero_point) * self.scale


def signed_affine(low: float, high: float) -> Affine:
    """Returns the scale and the signed zero point of a range, after it was widened to hold 0.

    A range of one real number has the scale 1.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if not math.isfinite(high - low):
        raise ValueError(f"a range of {low} to {high} has no scale")
    scale = (high - low) / LAST
    if scale < 2.0**-126:  # the smallest that float32 holds to all its digits
        return Affine(1.0, -(2 ** (BITS - 1)))
    return Affine(scale, -round(low / scale) - 2 ** (BITS - 1))


def affine_of(low: float, high: float) -> Affine:
    """Returns how unsigned 8-bit integers stand for a range of activations."""
    scale, zero_point = signed_affine(low, high)
    return Affine(scale, zero_point + 2 ** (BITS - 1))
