"""Equations 2.1 to 2.3 of the thesis, and the signed and unsigned integers that follow."""

from __future__ import annotations

import random

import pytest

from hires.quant.affine import LAST, Affine, affine_of, signed_affine


def thesis(x: float, low: float, high: float) -> int:
    """Equation 2.3 with the s and z of equations 2.1 and 2.2, the latter without its misprint."""
    s = (2**8 - 1) / (high - low)
    z = -round(low * s) - 2**7
    return int(min(max(round(x * s + z), -(2**7)), 2**7 - 1))


def ranges(count: int) -> list[tuple[float, float]]:
    drawn = random.Random(0)
    return [(-drawn.expovariate(0.1), drawn.expovariate(0.1)) for _ in range(count)]


def test_ends_of_the_range_are_the_ends_of_the_numbers():
    for low, high in ranges(200):
        signed = signed_affine(low, high)
        for number, end in ((-128, low), (127, high)):
            assert abs(signed.real(number) - end) <= 0.5001 * signed.scale


def test_unsigned_numbers_are_the_signed_ones_plus_128():
    """The thesis quantises to signed integers, oneDNN multiplies unsigned activations."""
    drawn = random.Random(1)
    for low, high in ranges(200):
        signed, unsigned = signed_affine(low, high), affine_of(low, high)
        assert unsigned == (signed.scale, signed.zero_point + 128)
        assert 0 <= unsigned.zero_point <= LAST
        for _ in range(20):
            x = drawn.uniform(1.2 * low, 1.2 * high)
            near_half = abs((x / signed.scale) % 1 - 0.5) < 1e-9
            assert near_half or unsigned.quantized(x) == thesis(x, low, high) + 128


def test_zero_is_exact_and_others_are_within_half_a_step():
    for low, high in ranges(200):
        affine = affine_of(low, high)
        assert affine.real(affine.quantized(0.0)) == 0.0
        for x in (low / 3, high / 7, (low + high) / 2):
            assert abs(affine.real(affine.quantized(x)) - x) <= 0.5001 * affine.scale


def test_a_range_is_widened_to_hold_zero():
    assert affine_of(3.0, 255.0) == Affine(1.0, 0)
    assert affine_of(-255.0, -1.0) == Affine(1.0, 255)
    assert affine_of(0.0, 0.0) == Affine(1.0, 0)


@pytest.mark.parametrize(("low", "high"), [(float("nan"), 1.0), (0.0, float("inf"))])
def test_a_range_without_end_is_refused(low, high):
    with pytest.raises(ValueError, match="has no scale"):
        affine_of(low, high)
