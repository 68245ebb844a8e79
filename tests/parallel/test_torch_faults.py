"""Convolutions and norms that the library gets wrong, against the same numbers in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hires.parallel.torch_faults import (
    SUBSTITUTES,
    conv2d,
    convolve_backward,
    convolve_transposed,
    lacks_kernel,
)
from hires.quant.int8_kernels import Geometry
from tests.conftest import REPOSITORY

SIZES = (10, 1000, 5000, 20000, 100000, 400000, 1000000)
BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
Shape = tuple[int, ...]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, Shape, list[int], list[int], list[int]]:
    """Input, weight, stride, padding and dilation; narrow outputs are the likely ones."""
    kernel = [draw(st.sampled_from([1, 3, 5, 7])) for _ in range(2)]
    stride = [draw(st.integers(1, 4)) for _ in range(2)]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    dilation = [draw(st.integers(1, 2)) for _ in range(2)]
    size = [draw(st.integers(1, 24)), draw(st.integers(1, 9))]
    sides = zip(size, padding, dilation, kernel, strict=True)
    assume(min(n + 2 * p - d * (k - 1) - 1 for n, p, d, k in sides) >= 0)
    n, channels, filters = (draw(st.sampled_from([1, 8, 64])) for _ in range(3))
    return (n, channels, *size), (filters, channels, *kernel), stride, padding, dilation


def leave_nan() -> None:
    """Frees memory that is full of NaN, for the next who asks for memory."""
    left = [torch.full((size,), float("nan")) for size in SIZES]
    del left


def compare(
    name: str,
    of_x: Shape,
    of_weight: Shape,
    how: tuple[Any, ...],
    dtype: torch.dtype,
    autocast: bool = False,
    limit: float = 0.0,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Compares output and gradients with float64; returns operands, last gradient, theirs.

    ``limit`` is of the norm of the errors; 0: every number is rounded once or, in bf16, by parts.
    """
    torch.manual_seed(3)
    *_, groups = how if "transpose" not in name else how[:-1]
    filters = of_weight[1] * groups if "transpose" in name else of_weight[0]
    operands = [torch.randn(shape).to(dtype) for shape in (of_x, of_weight, (filters,))]
    operands[0] = operands[0].contiguous(memory_format=torch.channels_last)
    wide = torch.float32 if autocast else dtype
    ours = [t.to(wide).detach().requires_grad_() for t in operands]
    exact = [t.double().requires_grad_() for t in operands]
    plain = getattr(torch, name)(*exact, *how)
    grad = torch.randn(plain.shape).to(dtype)
    plain.backward(grad.double())
    leave_nan()
    function = {"conv2d": conv2d, "conv_transpose2d": convolve_transposed}[name]
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        output = function(*ours, *how)
    assert output.dtype == dtype
    leave_nan()
    output.backward(grad)
    # Without oneDNN's bf16 torch rounds the weight's gradient of each of two samples, and their
    # sum: three halves.
    parts = 1.5 if dtype == torch.bfloat16 and not BF16 else 1
    pairs = [(output, plain), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    for one, other in pairs:
        error = one.double() - other
        if limit:
            assert error.norm() <= limit * (other.norm() + 1e-9)
        else:
            rounding = parts * torch.finfo(dtype).eps
            assert error.abs().max() <= rounding * other.abs().max()
    return ours, grad, [one.grad for one in exact]


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_output_and_gradients_are_those_of_the_same_numbers_in_float64(drawn):
    *_, stride, padding, dilation = drawn
    how = stride, padding, dilation, 1
    (x, weight, _), grad, exact = compare("conv2d", *drawn[:2], how, torch.bfloat16, limit=0.02)
    leave_nan()
    again = convolve_backward(grad, x, weight, Geometry(*how), [True, True, False])
    assert again[2] is None
    for one, other in zip(again[:2], exact, strict=False):
        assert (one.double() - other).norm() <= 0.02 * (other.norm() + 1e-9)


# These were wrong with two threads, most of them every time.
ROW_STRIDES: list[tuple[str, Shape, Shape, tuple[Any, ...]]] = [
    ("conv2d", (8, 64, 23, 3), (1, 64, 1, 3), ([2, 3], [0, 0], [1, 1], 1)),
    ("conv2d", (2, 192, 24, 2), (2, 192, 3, 2), ([4, 2], [0, 0], [1, 1], 1)),
    ("conv2d", (8, 96, 23, 2), (1, 96, 1, 2), ([3, 4], [0, 0], [1, 1], 1)),
    # The rows that are read lie in the padding too, and apart.
    ("conv2d", (2, 64, 9, 2), (4, 64, 2, 2), ([4, 2], [1, 0], [2, 1], 1)),
    ("conv2d", (2, 64, 9, 5), (4, 64, 1, 1), ([2, 2], [1, 1], [1, 1], 1)),
    # Padding, more rows, dilation.
    ("conv_transpose2d", (2, 16, 8, 1), (16, 64, 1, 3), ([3, 3], 0, 0, 1, 1)),
    ("conv_transpose2d", (2, 2, 6, 1), (2, 192, 3, 2), ([4, 2], 0, 0, 1, 1)),
    ("conv_transpose2d", (2, 2, 6, 3), (2, 64, 2, 2), ([4, 2], [1, 0], [3, 0], 1, [2, 1])),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ROW_STRIDES)
def test_row_strides_above_the_kernel_give_the_numbers_of_float64(case, dtype):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(3):
            compare(*case, dtype, limit=1e-5 if dtype == torch.float32 else 0.02)
    finally:
        torch.set_num_threads(threads)


OVERRUN = """
import torch
from hires.parallel.torch_faults import convolve, convolve_backward
from hires.quant.int8_kernels import Geometry
torch.set_num_threads(1)
for n, channels, filters, stride in ((4, 8, 16, (2, 2)), (4, 12, 40, (1, 2)), (1, 7, 8, (2, 1))):
    x = torch.randn(n, channels, 64, 64).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(filters, channels, 1, 1).requires_grad_()
    for _ in range(3):
        how = Geometry(stride)
        found = convolve(x, weight, None, how)
        grad = torch.randn_like(found)
        found.backward(grad)
        convolve_backward(grad, x, weight.detach(), how, [True, True, False])
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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("of_weight", "how"),
    [
        ((6, 8, 3, 3), (2, 1, 1, 1)),
        ((6, 8, 4, 2), (1, "same", 1, 1)),
        ((6, 8, 3, 2), (1, "valid", 2, 1)),
        ((8, 1, 3, 3), (1, 1, 1, 8)),
        ((6, 8, 2, 2), (3, 0, 1, 1)),
    ],
)
def test_gradients_in_fp16_are_those_of_the_rounded_numbers(of_weight, how, autocast):
    # oneDNN computes them in loops that take 600 times as long as fp32.
    compare("conv2d", (2, 8, 11, 9), of_weight, how, torch.float16, autocast)


@pytest.mark.parametrize(("stride", "groups", "more"), [(2, 1, 1), (3, 2, 0)])
def test_gradients_of_a_transposed_convolution_in_fp16(stride, groups, more):
    how, shapes = (stride, 1, more, groups, 1), ((2, 8, 6, 5), (8, 4 // groups, 2, 3))
    compare("conv_transpose2d", *shapes, how, torch.float16)


def defined(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    parts = x.reshape(len(x), groups, -1)
    means, variances = parts.mean(2, keepdim=True), parts.var(2, unbiased=False, keepdim=True)
    y = ((parts - means) * (variances + 1e-5).rsqrt()).view(x.shape)
    return y * weight[:, None, None] + bias[:, None, None]


@pytest.mark.parametrize(
    ("kind", "needs"), [("group_norm", True), ("instance_norm", True), ("instance_norm", False)]
)
def test_gradients_are_those_of_the_definition(kind, needs):
    torch.manual_seed(2)
    x = torch.randn(2, 6, 5, 7, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_(needs)
    weight, bias = (torch.randn(6, dtype=torch.float64).requires_grad_() for _ in range(2))
    mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    if kind == "group_norm":
        made = SUBSTITUTES["group_norm"](x, 3, weight, bias)
    else:
        args = mean, var, True, 0.3, 1e-5, False
        made = SUBSTITUTES["instance_norm"](x, weight, bias, *args)
    expected = defined(x, weight, bias, 3 if kind == "group_norm" else 6)
    assert torch.allclose(made, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(made)  # channels-last, as the next layer's
    leaves = [weight, bias, *([x] if needs else [])]
    found, wanted = (torch.autograd.grad(y, leaves, grad) for y in (made, expected))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)
    if kind == "instance_norm":  # moved, by the mean over the samples
        pixels = x.detach().flatten(2)
        assert torch.allclose(mean, 0.3 * pixels.mean((0, 2)))
        assert torch.allclose(var, 0.7 + 0.3 * pixels.var(2).mean(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_onednn_has_is_a_constant_of_a_compiled_region(dtype):
    @torch.compile(backend="eager", fullgraph=True)
    def product(x: Tensor) -> Tensor:
        return 2 * x if lacks_kernel(x, dtype) else x

    with torch.no_grad():
        assert product(torch.ones(2, dtype=dtype)).shape == (2,)
