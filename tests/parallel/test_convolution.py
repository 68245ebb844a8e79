"""Convolutions that the library gets wrong, against the same numbers in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hires.parallel import compile_node  # noqa: F401, registers
from hires.parallel.convolution import (
    SUBSTITUTES,
    convolve,
    convolve_backward,
    convolve_transposed,
)
from tests.conftest import REPOSITORY

SIZES = (10, 1000, 5000, 20000, 100000, 400000, 1000000)

Shape = tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, Shape, list[int], list[int], list[int]]:
    """Input, weight, stride, padding and dilation; narrow outputs are the likely ones."""
    kernel = [draw(st.sampled_from([1, 3, 5, 7])) for _ in range(2)]
    stride = [draw(st.integers(1, 4)) for _ in range(2)]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    dilation = [draw(st.integers(1, 2)) for _ in range(2)]
    size = [draw(st.integers(1, 24)), draw(st.integers(1, 9))]
    free = [
        n + 2 * p - d * (k - 1) - 1
        for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)
    ]
    assume(min(free) >= 0)
    n, channels, filters = (draw(st.sampled_from([1, 8, 64])) for _ in range(3))
    return (n, channels, *size), (filters, channels, *kernel), stride, padding, dilation


def leave_nan() -> None:
    """Frees memory that is full of NaN, for the next who asks for memory."""
    left = [torch.full((size,), float("nan")) for size in SIZES]
    del left


def distance(found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact).norm() / (exact.norm() + 1e-9)).detach())


def numbers(shape: Shape, seed: int) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_output_and_gradients_are_those_of_the_same_numbers_in_float64(drawn):
    of_x, of_weight, stride, padding, dilation = drawn
    x, weight = (numbers(s, i).requires_grad_() for i, s in enumerate((of_x, of_weight)))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.conv2d(*wide, None, stride, padding, dilation)
    grad = numbers(tuple(exact.shape), 2)
    exact.backward(grad.double())
    leave_nan()
    found = convolve(x, weight, None, stride, padding, dilation, 1)
    assert found.dtype == torch.bfloat16
    leave_nan()
    found.backward(grad)
    how = (stride, dilation, 1)
    leave_nan()
    again = convolve_backward(grad, x, weight, padding, how, [True, True, False])
    assert again[2] is None
    for one, other in (
        (found, exact),
        *zip((x.grad, weight.grad), (w.grad for w in wide), strict=True),
        *zip(again[:2], (w.grad for w in wide), strict=True),
    ):
        assert distance(one, other) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("of_x", "of_weight", "stride", "padding", "dilation"),
    [
        # These were wrong with two threads, most of them every time.
        ((8, 64, 23, 3), (1, 64, 1, 3), [2, 3], [0, 0], [1, 1]),
        ((8, 64, 23, 3), (2, 64, 1, 3), [2, 3], [0, 0], [1, 1]),
        ((2, 192, 24, 2), (2, 192, 3, 2), [4, 2], [0, 0], [1, 1]),
        ((8, 96, 23, 2), (1, 96, 1, 2), [3, 4], [0, 0], [1, 1]),
        # The rows that are read lie in the padding too, and apart.
        ((2, 64, 9, 2), (4, 64, 2, 2), [4, 2], [1, 0], [2, 1]),
        ((2, 64, 9, 5), (4, 64, 1, 1), [2, 2], [1, 1], [1, 1]),
    ],
)
def test_row_strides_above_the_kernel_give_the_numbers_of_float64(
    of_x, of_weight, stride, padding, dilation, dtype
):
    x, weight = (numbers(s, i).to(dtype).requires_grad_() for i, s in enumerate((of_x, of_weight)))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.conv2d(*wide, None, stride, padding, dilation)
    grad = numbers(tuple(exact.shape), 2).to(dtype)
    exact.backward(grad.double())
    limit, threads = 1e-5 if dtype == torch.float32 else 0.02, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            x.grad = weight.grad = None
            leave_nan()
            found = convolve(x, weight, None, stride, padding, dilation, 1)
            found.backward(grad)
            assert distance(found, exact) < limit
            assert distance(x.grad, wide[0].grad) < limit
            assert distance(weight.grad, wide[1].grad) < limit
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("of_x", "of_weight", "stride", "how"),
    [
        # Gradients of these inputs were wrong with two threads: padding, more rows, dilation.
        ((2, 16, 8, 1), (16, 64, 1, 3), [3, 3], (0, 0, 1)),
        ((2, 2, 6, 1), (2, 192, 3, 2), [4, 2], (0, 0, 1)),
        ((2, 2, 6, 3), (2, 64, 2, 2), [4, 2], ([1, 0], [3, 0], [2, 1])),
    ],
)
def test_transposed_row_strides_above_the_kernel_give_the_numbers_of_float64(
    of_x, of_weight, stride, how, dtype
):
    padding, more, dilation = how
    x, weight = (numbers(s, i).to(dtype).requires_grad_() for i, s in enumerate((of_x, of_weight)))
    bias = torch.randn(of_weight[1]).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.conv_transpose2d(*wide, bias.double(), stride, padding, more, 1, dilation)
    grad = numbers(tuple(exact.shape), 2).to(dtype)
    exact.backward(grad.double())
    limit, threads = 1e-5 if dtype == torch.float32 else 0.02, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            x.grad = weight.grad = None
            found = convolve_transposed(x, weight, bias, stride, padding, more, 1, dilation)
            found.backward(grad)
            assert found.shape == exact.shape
            assert distance(found, exact) < limit
            assert distance(x.grad, wide[0].grad) < limit
            assert distance(weight.grad, wide[1].grad) < limit
    finally:
        torch.set_num_threads(threads)


OVERRUN = """
import torch
from hires.parallel.convolution import convolve, convolve_backward
torch.set_num_threads(1)
for n, channels, filters, stride in ((4, 8, 16, (2, 2)), (4, 12, 40, (1, 2)), (1, 7, 8, (2, 1))):
    x = torch.randn(n, channels, 64, 64).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(filters, channels, 1, 1).requires_grad_()
    for _ in range(3):
        found = convolve(x, weight, None, stride, 0, 1, 1)
        grad = torch.randn_like(found)
        found.backward(grad)
        how = (list(stride), [1, 1], 1)
        convolve_backward(grad, x, weight.detach(), [0, 0], how, [True, True, False])
"""


def test_nothing_is_written_beyond_the_gradient_of_a_strided_1x1_convolution():
    # glibc looks at the end of every block that is freed; elsewhere the name is not found.
    checks = {"LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    environ = {**os.environ, **checks, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", OVERRUN]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((6, 8, 3, 3), {"padding": 1}),
        ((6, 8, 3, 3), {"padding": 1, "stride": 2}),
        ((6, 8, 4, 2), {"padding": "same"}),
        ((6, 8, 3, 2), {"padding": "valid", "dilation": 2}),
        ((6, 8, 1, 1), {"stride": 2}),
        ((8, 1, 3, 3), {"padding": 1, "groups": 8}),
        ((6, 8, 2, 2), {"stride": 3}),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_gradients_in_fp16_are_those_of_the_rounded_numbers(shape, how, autocast):
    # oneDNN computes them in loops that take 600 times as long as fp32.
    torch.manual_seed(1)
    dtype = torch.float32 if autocast else torch.float16
    x = torch.randn(2, 8, 11, 9).to(dtype).requires_grad_()
    weight = (torch.randn(shape) / 8).to(dtype).requires_grad_()
    bias = torch.randn(shape[0]).to(dtype).requires_grad_()
    keys = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **how}
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        found = convolve(x, weight, bias, *keys.values())
    assert found.dtype == torch.float16
    grad = torch.randn(found.shape).half()
    found.backward(grad)
    exact = [t.detach().half().double().requires_grad_() for t in (x, weight, bias)]
    plain = torch.conv2d(*exact, *keys.values())
    plain.backward(grad.double())
    pairs = zip((x, weight, bias), exact, strict=True)
    _compare_halves([(found, plain), *((a.grad, b.grad) for a, b in pairs)])


def _compare_halves(pairs):
    # A sum of products in fp32 is rounded once: 2^-11 of the largest number.
    for one, other in pairs:
        assert (one.double() - other).abs().max() <= 2**-11 * other.abs().max()


@pytest.mark.parametrize(("stride", "groups", "outer"), [(2, 1, 1), (3, 2, 0), (1, 1, 0)])
def test_gradients_of_a_transposed_convolution_in_fp16(stride, groups, outer):
    torch.manual_seed(2)
    operands = torch.randn(2, 8, 6, 5), torch.randn(8, 4 // groups, 2, 3) / 4, torch.randn(4)
    x, weight, bias = ours = [t.half().requires_grad_() for t in operands]
    exact = [t.detach().double().requires_grad_() for t in ours]
    found = convolve_transposed(x, weight, bias, stride, 1, outer, groups, 1)
    plain = torch.conv_transpose2d(*exact, stride, 1, outer, groups, 1)
    grad = torch.randn(plain.shape).half()
    found.backward(grad)
    plain.backward(grad.double())
    pairs = zip(ours, exact, strict=True)
    _compare_halves([(found, plain), *((a.grad, b.grad) for a, b in pairs)])


# ---- one and three dims, in half precision

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
