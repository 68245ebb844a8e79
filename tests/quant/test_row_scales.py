"""Products of real rows with 8-bit weights have the bits of their definition."""

from __future__ import annotations

import math

import pytest
import torch

from hires.quant import int8_kernels
from hires.quant.row_scales import multiply_rows, quantized_rows
from tests.helpers.int8_cases import rows_by_definition

LARGEST = torch.finfo(torch.float32).max


def layer(features: int, outputs: int, bias: bool = True):
    """Returns weight, multiplier, offset and bias."""
    weight = torch.randint(-127, 128, (outputs, features, 1, 1), dtype=torch.int8)
    multiplier = torch.rand(outputs) / 100
    offset = -(weight.sum((1, 2, 3)).double() * multiplier).float()
    return weight, multiplier, offset, torch.randn(outputs) if bias else None


def inputs(features: int) -> torch.Tensor:
    """Returns rows of many kinds, each of which has neighbours of the others."""
    torch.manual_seed(features)
    x = torch.randn(14, features) * torch.logspace(-6, 6, 14).view(-1, 1)
    x[1], x[2], x[3] = 0.0, x[2].abs(), -x[3].abs()
    x[4], x[5] = 3.25, -1e-44  # one number; below what has all digits
    x[6] = torch.randn(features) * 1e-39
    x[7] = torch.randn(features).clamp(-1, 1) * 1e37
    x[8, 0], x[9, -1], x[10, features // 2] = torch.inf, -torch.inf, torch.nan
    x[11] = torch.nan
    x[12] = torch.inf
    return x


@pytest.mark.parametrize("features", [1, 7, 64, 515, 2000])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_have_the_bits_of_the_definition(features, bias):
    x, how = inputs(features), layer(features, 33, bias)
    y = multiply_rows(x, *how)
    assert torch.equal(y, rows_by_definition(x, *how))
    assert torch.isfinite(y).all()


def test_processors_that_saturate_have_the_same_bits(monkeypatch):
    x, how = inputs(700), layer(700, 19)
    made = multiply_rows(x, *how)
    monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda: False)
    assert torch.equal(multiply_rows(x, *how), made)


def test_rows_do_not_depend_on_those_beside_them():
    x, how = inputs(130).view(2, 7, 130), layer(130, 21)
    whole = multiply_rows(x, *how)
    for first in range(7):
        for end in range(first + 1, 8):
            assert torch.equal(multiply_rows(x[:, first:end], *how), whole[:, first:end])
    assert torch.equal(multiply_rows(x[1:], *how), whole[1:])
    across = x.transpose(0, 1)  # in another order in memory
    assert torch.equal(multiply_rows(across, *how), whole.transpose(0, 1))


def test_a_row_of_zeros_makes_the_bias():
    weight, multiplier, offset, bias = layer(40, 9)
    y = multiply_rows(torch.zeros(3, 40), weight, multiplier, offset, bias)
    assert torch.equal(y, bias.expand(3, -1))
    rows = quantized_rows(torch.zeros(3, 40))
    assert not rows.numbers.any()
    assert (rows.scale == 1).all()


def test_numbers_that_are_not_finite_are_clamped_to_the_range_of_the_others():
    """As a quantize with a scale of a calibration clamps them."""
    x = torch.tensor([[0.5, -0.25, math.inf, 1.0], [0.5, -0.25, -math.inf, math.nan]])
    rows = quantized_rows(x)
    tame = quantized_rows(torch.tensor([[0.5, -0.25, 1.0, 1.0], [0.5, -0.25, -0.25, -0.25]]))
    assert torch.equal(rows.numbers, tame.numbers)
    assert torch.equal(rows.scale, tame.scale)


def test_the_distance_of_the_ends_may_be_more_than_fp32_holds():
    rows = quantized_rows(torch.tensor([[LARGEST, -LARGEST, 0.0]]))
    assert torch.isfinite(rows.scale).all()
    assert rows.numbers.tolist() == [[255, 0, 128]]


def test_products_are_those_of_real_numbers_but_for_a_rounding():
    """Half a step of each number, times its weight, and fp32's own rounding."""
    torch.manual_seed(0)
    x, (weight, multiplier, offset, bias) = torch.randn(50, 300), layer(300, 40)
    real = weight[:, :, 0, 0].double() * multiplier.double().view(-1, 1)
    exact = x.double() @ real.t() + bias
    error = (multiply_rows(x, weight, multiplier, offset, bias) - exact).abs()
    # The zero point is rounded, too: the range of 256 numbers may be half a step beside the row's.
    bound = quantized_rows(x).scale * real.abs().sum(1) + 1e-5 * exact.abs().max()
    assert (error <= bound).all()
    assert float(error.mean() / exact.abs().mean()) < 0.02
