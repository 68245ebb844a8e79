"""Convolutions of one and three dims, against the same numbers in float64."""

from __future__ import annotations

import pytest
import torch

from hires.parallel import compile_node, wide_convolution  # noqa: F401, registers
from hires.parallel.convolution import SUBSTITUTES
from tests.parallel.test_convolution import leave_nan

BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
# Shapes of input and weight, stride, padding and dilation.
PLAIN = [
    ((2, 8, 11), (6, 4, 3), 1, 1, 1),
    ((2, 8, 11), (6, 4, 4), 1, "same", 1),
    ((8, 12), (6, 4, 1), 2, 0, 1),
    ((2, 8, 5, 6, 7), (6, 4, 3, 3, 3), 1, 1, 1),
    ((2, 8, 5, 6, 7), (6, 4, 2, 3, 2), 1, "same", [1, 2, 1]),
    ((8, 5, 6, 7), (6, 4, 1, 1, 1), [2, 1, 2], 0, 1),
]
# oneDNN is wrong here in half precision, or ends the process.
FAULTY = [
    ((8, 8, 2), (64, 4, 5), 4, 2, 1),
    ((1, 8, 2, 5, 1), (64, 4, 1, 3, 3), [1, 1, 2], [0, 1, 1], 1),
    ((1, 8, 1, 3, 7), (8, 4, 5, 5, 5), [3, 1, 4], [2, 2, 1], 1),
    ((2, 8, 1, 9, 9), (16, 4, 2, 3, 3), 1, 1, [2, 1, 1]),
    ((8, 64, 9, 9, 11), (2, 32, 1, 3, 2), [4, 1, 1], [0, 1, 0], [2, 2, 2]),
]


@pytest.mark.parametrize(("of_x", "of_weight", *"spd"), PLAIN + FAULTY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_half_precision_rounds_the_numbers_of_float64(of_x, of_weight, s, p, d, dtype):
    name = f"conv{len(of_weight) - 2}d"
    _compare(name, of_x, of_weight, of_weight[0], (s, p, d, 2), dtype)


@pytest.mark.parametrize(
    ("of_x", "of_weight", "stride", "padding", "outer"),
    [
        ((2, 8, 6), (8, 3, 3), 2, 1, 1),
        ((8, 6), (8, 3, 4), 3, 0, 0),
        ((2, 8, 1), (8, 4, 5), 2, 2, 0),
        ((2, 8, 3, 4, 5), (8, 3, 2, 2, 3), 2, 0, [1, 0, 1]),
        ((8, 3, 4, 5), (8, 3, 1, 2, 2), 1, 0, 0),
        ((1, 8, 2, 7, 1), (8, 64, 3, 1, 3), [3, 1, 2], 0, 0),
        ((1, 8, 1, 3, 7), (8, 4, 5, 5, 5), [3, 1, 4], [2, 2, 1], 0),
        ((2, 8, 3, 4, 5), (8, 3, 1, 2, 3), [2, 1, 1], 0, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_transposed_half_precision_rounds_the_numbers_of_float64(
    of_x, of_weight, stride, padding, outer, dtype
):
    name, channels = f"conv_transpose{len(of_weight) - 2}d", 2 * of_weight[1]
    _compare(name, of_x, of_weight, channels, (stride, padding, outer, 2, 1), dtype)


def _compare(name, of_x, of_weight, channels, how, dtype):
    torch.manual_seed(3)
    shapes = of_x, of_weight, (channels,)
    ours = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in ours]
    plain = getattr(torch, name)(*exact, *how)
    grad = torch.randn(plain.shape).to(dtype)
    plain.backward(grad.double())
    leave_nan()
    found = SUBSTITUTES[name](*ours, *how)
    leave_nan()
    found.backward(grad)
    pairs = [(found, plain), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    # Sums in fp32, rounded once or, by oneDNN's bf16, once for each part. Without oneDNN's bf16
    # torch rounds the weight's gradient of each of two samples, and their sum: three halves.
    parts = 1.5 if dtype == torch.bfloat16 and not BF16 else 1
    for one, other in pairs:
        rounding = parts * torch.finfo(dtype).eps
        assert (one.double() - other).abs().max() <= rounding * other.abs().max()


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("name", ["conv{}d", "conv_transpose{}d"])
def test_gradients_in_fp16_are_computed_in_fp32(dims, name, monkeypatch):
    # oneDNN's own, in fp16, take 70 to 130 times as long as fp32.
    calls = []
    backward = torch.ops.aten.convolution_backward

    def recording(grad, *args):
        calls.append(grad.dtype)
        return backward(grad, *args)

    monkeypatch.setattr(wide_convolution.torch.ops.aten, "convolution_backward", recording)
    x = torch.randn(2, 4, *[6] * dims).half().requires_grad_()
    weight = torch.randn(4, 4, *[3] * dims).half()
    rest = (1, 1, 0, 1, 1) if "transpose" in name else (1, 1, 1, 1)
    SUBSTITUTES[name.format(dims)](x, weight, None, *rest).sum().backward()
    assert calls == [torch.float32]
