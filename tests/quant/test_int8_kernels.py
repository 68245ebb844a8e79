"""Int8 convolutions are the same bits however they are computed, and oneDNN computes them."""

from __future__ import annotations

import random

import pytest
import torch

from hires.parallel.kernel_choice import random_numbers
from hires.quant import int8_kernels
from hires.quant.int8_kernels import (
    Added,
    Geometry,
    OnednnProduct,
    Rescale,
    Rescaling,
    convolve_int8,
    is_matrix,
    multiply_int8,
)
from tests.helpers.int8_cases import Case, cases

NEEDS_VNNI = pytest.mark.skipif(
    not int8_kernels.has_exact_sums(), reason="this CPU sums 8-bit products in 16"
)


def test_every_shape_has_the_bits_of_the_definition():
    for case in cases(600):
        before = None if case.added is None else case.added.numbers.clone()
        assert torch.equal(case.computed(), case.expected()), str(case)
        if case.added is not None and before is not None:
            assert torch.equal(case.added.numbers, before), "what is added was overwritten"


def test_any_window_has_the_bits_of_the_whole():
    """Rows, columns and rectangles of the output, from windows whose border was copied."""
    drawn = random.Random(1)
    for case in cases(300, seed=1):
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


def test_processors_that_saturate_compute_the_same_bits(monkeypatch):
    monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda: False)
    for case in cases(150, seed=2):
        assert torch.equal(case.computed(), case.expected()), str(case)


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("channels", [16, 128, 512])
def test_largest_numbers_of_any_signs_do_not_saturate(channels, groups, kernel):
    """AVX2's vpmaddubsw holds a sum of two products in 16 bits, which 255 * 127 * 2 exceeds."""
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


def test_gpus_without_triton_compute_the_same_bits(monkeypatch):
    """In fp64: cuDNN may transform the input of a convolution, which rounds."""
    monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda: False)
    monkeypatch.setattr(int8_kernels, "_sums_products", lambda x: False)
    conv2d, types = torch.conv2d, set()
    monkeypatch.setattr(torch, "conv2d", lambda x, *rest: types.add(x.dtype) or conv2d(x, *rest))
    for case in cases(40, seed=5):
        assert torch.equal(case.computed(), case.expected()), str(case)
    assert types == {torch.float64}


@NEEDS_VNNI
def test_products_of_matrices_have_the_bits_of_convolutions():
    matrices = [case for case in cases(600, seed=6) if is_matrix(case.weight, case.how)]
    assert len(matrices) > 20
    assert any(case.added for case in matrices)
    assert any(case.how.stride != [1, 1] for case in matrices)
    for case in matrices:
        product = OnednnProduct(case.weight, case.x.shape, case.how, case.border, by_rows=True)
        assert torch.equal(product(case.x, case.rescale, case.added), case.expected()), str(case)


@NEEDS_VNNI
def test_sums_are_written_over_what_is_added_if_they_may_be():
    torch.manual_seed(7)
    weight = torch.randint(-127, 128, (32, 16, 1, 1), dtype=torch.int8)
    x, other = (random_numbers([2, channels, 5, 5]) for channels in (16, 32))
    for by_rows in (False, True):
        product = OnednnProduct(weight, x.shape, Geometry(), 0, by_rows=by_rows)
        rescale, mine = Rescale(torch.full((32,), 1e-3), torch.zeros(32)), other.clone()
        expected = product(x, rescale, Added(mine, 0.5))
        assert torch.equal(mine, other)
        made = product(x, rescale, Added(mine, 0.5, overwrites=True))
        assert torch.equal(made, expected)
        assert made.data_ptr() == mine.data_ptr(), "the sum is a copy"


@NEEDS_VNNI
def test_kernels_of_onednn_compute():
    """What ``by_onednn`` promises: the profiler lists its kernel of 8 bits, and no other one."""
    drawn = random.Random(3)
    torch.manual_seed(3)
    case = Case(drawn)
    with torch.profiler.profile() as profile:
        case.computed()
        Rescaling(case.x.shape[1], 0.5, 3.0)(case.x, 0, 255)
    names = {event.key for event in profile.key_averages()}
    assert any(name.startswith("onednn::qconv2d_pointwise") for name in names), names
    assert names.isdisjoint({"aten::conv2d", "aten::convolution", "aten::mkldnn_convolution"})


@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (3, 10), (2, 4, 6), (1, 1, 1, 1)])
def test_other_scales_of_numbers_of_any_dims(shape):
    x, other = (torch.randint(0, 256, shape, dtype=torch.uint8) for _ in "ab")
    channels = shape[1] if len(shape) == 4 else shape[-1]
    made = Rescaling(channels, 0.7, 12.0)(x, 3, 200, Added(other, 0.25))
    exact = x.float() * torch.tensor(0.7) + 12.0
    exact = (other.double() * 0.25 + exact.double()).float()
    assert torch.equal(made, exact.round().clamp(3, 200).to(torch.uint8))


@pytest.mark.parametrize("other", [(3, 17, 1, 1), (3, 17, 6, 5), (3, 1, 6, 5), (1, 17, 1, 1)])
def test_products_and_sums_of_any_operands(other):
    x = torch.randint(0, 256, (3, 17, 6, 5), dtype=torch.uint8)
    for rows in (x, x.contiguous(memory_format=torch.channels_last)[:, :, 1:, :4], x[:, :, :0]):
        size = [b if b == 1 else a for a, b in zip(rows.shape, other, strict=True)]
        factor, offset = torch.randn(size) * 2, torch.randn(size) * 100
        made = int8_kernels.multiply_add_int8(rows, factor, offset)
        assert torch.equal(made, (rows * factor + offset).round().clamp(0, 255).to(torch.uint8))


def test_weights_that_change_are_packed_again():
    case = cases(1, seed=5)[0]
    case.computed()
    with torch.no_grad():
        case.weight.neg_()
    again = Case.__new__(Case)
    again.__dict__ = {**case.__dict__, "weight": case.weight.clone()}
    assert torch.equal(case.computed(), again.computed())
