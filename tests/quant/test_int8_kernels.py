"""Products of 8-bit integers have the bits of their definition, however they are computed."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hires.quant import int8_kernels
from hires.quant.int8_kernels import (
    Added,
    Geometry,
    OnednnProduct,
    Rescale,
    Rescaling,
    adds_by_rows,
    convolve_int8,
    is_matrix,
    multiply_int8,
)
from hires.quant.row_scales import multiply_rows, quantized_rows
from tests.helpers.int8_cases import Case, cases, rows_by_definition

NEEDS_VNNI = pytest.mark.skipif(
    not int8_kernels.has_exact_sums(), reason="this CPU sums 8-bit products in 16"
)


@pytest.mark.parametrize("exact", [True, False])
def test_every_shape_has_the_bits_of_the_definition(exact, monkeypatch):
    if not exact:  # on processors that saturate, too
        monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda largest=0: False)
    for case in cases(160 if exact else 60):
        before = None if case.added is None else case.added.numbers.clone()
        assert torch.equal(case.computed(), case.expected()), str(case)
        if case.added is not None and before is not None:
            assert torch.equal(case.added.numbers, before), "what is added was overwritten"


def test_any_window_has_the_bits_of_the_whole():
    """Rows, columns and rectangles of the output, from windows whose border was copied."""
    drawn = random.Random(1)
    for case in cases(100, seed=1):
        whole, (rows, columns) = case.computed(), case.how.stride
        r0, c0 = (drawn.randrange(size) for size in whole.shape[2:])
        r1 = drawn.randint(r0 + 1, whole.shape[2])
        c1 = drawn.randint(c0 + 1, whole.shape[3])
        window = case.padded()[:, :, r0 * rows : (r1 - 1) * rows + case.reach[0]]
        window = window[:, :, :, c0 * columns : (c1 - 1) * columns + case.reach[1]]
        added = case.added
        if added is not None:
            added = added._replace(numbers=added.numbers[:, :, r0:r1, c0:c1])
        how = case.how._replace(padding=(0, 0))
        part = convolve_int8(window, case.weight, how, case.rescale, added=added)
        assert torch.equal(part, whole[:, :, r0:r1, c0:c1]), str(case)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("channels", "groups", "kernel"), [(512, 1, 3), (128, 4, 7)])
def test_largest_numbers_of_any_signs_do_not_saturate(channels, groups, kernel, exact, monkeypatch):
    """AVX2's vpmaddubsw holds a sum of two products in 16 bits, which 255 * 127 * 2 exceeds."""
    if not exact:  # where fp32 sums them, of 24 bits
        monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda largest=0: False)
    torch.manual_seed(channels)
    x = torch.full((2, channels, 9, 8), 255, dtype=torch.uint8)
    x[1] = torch.where(torch.rand(x[1].shape) < 0.1, 0, x[1])
    weight = torch.full((32, channels // groups, kernel, kernel), 127, dtype=torch.int8)
    weight[1::4] = -127
    weight[2::4, ::2] = -127
    weight[3::4] = torch.where(torch.rand(weight[3::4].shape) < 0.5, 127, -127)
    how = Geometry(padding=(kernel // 2, kernel // 2), groups=groups)
    one = Rescale(torch.ones(32), torch.zeros(32), dtype=torch.float32)
    sums = torch.conv2d(x.double(), weight.double(), None, 1, how.padding, 1, groups)
    assert torch.equal(convolve_int8(x, weight, how, one), sums.float())
    rows = x.permute(0, 2, 3, 1)[..., : weight.shape[1]]
    sums = rows.double() @ weight[:, :, 0, 0].double().t()
    assert torch.equal(multiply_int8(rows, weight[:, :, :1, :1], one), sums.float())


def test_weights_that_change_are_packed_again():
    [case] = cases(1, seed=5)
    case.computed()
    case.weight.neg_()
    again = Case.__new__(Case)
    again.__dict__ = {**case.__dict__, "weight": case.weight.clone()}
    assert torch.equal(case.computed(), again.computed())


def test_gpus_compute_the_same_bits(monkeypatch):
    """By products of int8 matrices or in fp64: cuDNN may transform the input, which rounds."""
    monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda largest=0: False)
    monkeypatch.setattr(int8_kernels, "_sums_products", lambda x: False)
    conv2d, int_mm, types, sizes = torch.conv2d, torch._int_mm, set(), []
    monkeypatch.setattr(torch, "conv2d", lambda x, *rest: types.add(x.dtype) or conv2d(x, *rest))
    monkeypatch.setattr(torch, "_int_mm", lambda x, w: sizes.append(w.shape) or int_mm(x, w))
    for case in cases(80, seed=5):
        assert torch.equal(case.computed(), case.expected()), str(case)
    assert types == {torch.float64}
    assert sizes
    assert not any(length % 8 for shape in sizes for length in shape)


@NEEDS_VNNI
def test_products_of_matrices_have_the_bits_of_convolutions():
    matrices = [case for case in cases(600, seed=6) if is_matrix(case.weight, case.how)]
    assert len(matrices) > 20
    assert any(case.added for case in matrices)
    assert any(case.how.stride != [1, 1] for case in matrices)
    for case in matrices:
        product = OnednnProduct(case.weight, case.x.shape, case.how, case.border, by_rows=True)
        assert torch.equal(product(case.x, case.rescale, case.added), case.expected()), str(case)


def test_sums_are_products_of_matrices_only_where_these_are_fast(monkeypatch):
    weight, wide = (torch.ones((16, 64, k, k), dtype=torch.int8) for k in (1, 3))
    for vnni in (True, False):
        monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda vnni=vnni: vnni)
        assert adds_by_rows(weight, Geometry((2, 2))) is vnni
        assert not adds_by_rows(wide, Geometry())


@NEEDS_VNNI
@pytest.mark.parametrize("by_rows", [False, True])
def test_sums_are_written_over_what_is_added_if_they_may_be(by_rows):
    torch.manual_seed(7)
    weight = torch.randint(-127, 128, (32, 16, 1, 1), dtype=torch.int8)
    maps = (torch.randint(0, 256, (2, n, 5, 5), dtype=torch.uint8) for n in (16, 32))
    x, other = (one.contiguous(memory_format=torch.channels_last) for one in maps)
    product = OnednnProduct(weight, x.shape, Geometry(), 0, by_rows=by_rows)
    rescale, mine = Rescale(torch.full((32,), 1e-3), torch.zeros(32)), other.clone()
    expected = product(x, rescale, Added(mine, 0.5))
    assert torch.equal(mine, other)
    made = product(x, rescale, Added(mine, 0.5, overwrites=True))
    assert torch.equal(made, expected)
    assert made.data_ptr() == mine.data_ptr(), "the sum is a copy"


def test_other_scales_products_and_sums_of_any_dims():
    for shape in ((2, 5, 7, 3), (3, 10), (2, 4, 6), (1, 1, 1, 1)):
        x, other = (torch.randint(0, 256, shape, dtype=torch.uint8) for _ in "ab")
        channels = shape[1] if len(shape) == 4 else shape[-1]
        made = Rescaling(channels, 0.7, 12.0)(x, 3, 200, Added(other, 0.25))
        exact = x.float() * torch.tensor(0.7) + 12.0
        exact = (other.double() * 0.25 + exact.double()).float()
        assert torch.equal(made, exact.round().clamp(3, 200).to(torch.uint8))
    x = torch.randint(0, 256, (3, 17, 6, 5), dtype=torch.uint8)
    for operand in ((3, 17, 1, 1), (3, 17, 6, 5), (3, 1, 6, 5), (1, 17, 1, 1)):
        for rows in (x, x.contiguous(memory_format=torch.channels_last)[:, :, 1:, :4], x[:, :, :0]):
            size = [b if b == 1 else a for a, b in zip(rows.shape, operand, strict=True)]
            factor, offset = torch.randn(size) * 2, torch.randn(size) * 100
            made = int8_kernels.multiply_add_int8(rows, factor, offset)
            wanted = (rows * factor + offset).round().clamp(0, 255).to(torch.uint8)
            assert torch.equal(made, wanted)


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


@pytest.mark.parametrize(("features", "bias"), [(1, True), (7, False), (515, True)])
def test_rows_have_the_bits_of_the_definition(features, bias, monkeypatch):
    x, how = inputs(features), layer(features, 33, bias)
    y = multiply_rows(x, *how)
    assert torch.equal(y, rows_by_definition(x, *how))
    assert torch.isfinite(y).all()
    monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda largest=0: False)
    assert torch.equal(multiply_rows(x, *how), y)  # on processors that saturate, too


def test_rows_do_not_depend_on_those_beside_them():
    x, how = inputs(130).view(2, 7, 130), layer(130, 21)
    whole = multiply_rows(x, *how)
    for first in range(7):
        for end in range(first + 1, 8):
            assert torch.equal(multiply_rows(x[:, first:end], *how), whole[:, first:end])
    assert torch.equal(multiply_rows(x[1:], *how), whole[1:])
    across = x.transpose(0, 1)  # in another order in memory
    assert torch.equal(multiply_rows(across, *how), whole.transpose(0, 1))


def test_rows_of_zeros_infinities_and_the_largest_numbers_have_a_scale():
    zeros = quantized_rows(torch.zeros(3, 40))
    assert not zeros.numbers.any()
    assert (zeros.scale == 1).all()
    # Numbers that are not finite are clamped to the range of the others, as by a calibration.
    x = torch.tensor([[0.5, -0.25, math.inf, 1.0], [0.5, -0.25, -math.inf, math.nan]])
    tame = quantized_rows(torch.tensor([[0.5, -0.25, 1.0, 1.0], [0.5, -0.25, -0.25, -0.25]]))
    assert torch.equal(quantized_rows(x).numbers, tame.numbers)
    assert torch.equal(quantized_rows(x).scale, tame.scale)
    # The distance of the ends may be more than fp32 holds.
    rows = quantized_rows(torch.tensor([[LARGEST, -LARGEST, 0.0]]))
    assert torch.isfinite(rows.scale).all()
    assert rows.numbers.tolist() == [[255, 0, 128]]
