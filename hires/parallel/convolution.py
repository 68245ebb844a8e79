"""Computes convolutions as torch does, without four faults of oneDNN, and 1x1 kernels faster.

One output column in half precision: on processors with AMX, a convolution whose stride and kernel
are two or more columns and whose output is one column reads memory that it never wrote. Outputs and
gradients of weights are wrong, differ from run to run and may be NaN. The backward pass of a
transposed convolution does the same if its input is one column. Narrow tiles of deep layers have
that shape; they are small, so they are computed in fp32 from the same rounded numbers. Measured on
torch 2.13 over 13,000 random bf16 convolutions: no other shape failed. A related fault is
https://github.com/pytorch/pytorch/issues/169688.

Strided 1x1 kernels in fp32: on processors with AVX-512, the gradient of a weight with fewer than 16
channels per group is written beyond its memory if the maps are large, and the process dies later or
computes with overwritten numbers. Such a convolution reads one pixel of every stride, so these are
selected first and convolved with stride 1. Measured with a checking allocator on 1920 strided 1x1
convolutions of 1 to 104 channels in fp32 and bf16, of which 102 failed, all of this shape, and on
1360 random others.

Row strides above the rows of the kernel: on processors with AVX-512, outputs on narrow maps may be
wrong in any type but float64, and memory overwritten, as a buffer is sized for a stride cut to the
kernel (https://github.com/uxlfoundation/oneDNN/pull/5494). Such a convolution skips rows of its
input, so the rows that it reads are copied first, after which stride and kernel are equal:

    kernel of 2 rows, stride 3    rows 0 1 . 3 4 . 6 7    copied 0 1 3 4 6 7, stride 2

The gradient of a transposed convolution's input is such a convolution: its kernel gets rows of
zeros, and the result loses the rows that they add.

Gradients in fp16: see :mod:`hires.parallel.wide_convolution`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.parallel.substitutes import SUBSTITUTES
from hires.parallel.wide_convolution import (
    HALF,
    Operands,
    Size,
    by_onednn,
    is_slow_back,
    lacks_bf16,
    numeric_padding,
    plain_backward,
    product_type,
    run_wide,
    with_exact_sums,
    with_wide_gradients,
)
from hires.plan.operators.windows import pair

BLOCK = 16  # channels that the library pads a weight to


@SUBSTITUTES.register("conv2d")
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
) -> Tensor:
    """Returns the convolution of (n, C, h, w) with (K, C / groups, rows, cols), as torch's.

    The batch may be absent. Under autocast the arithmetic and the result are of autocast's type.
    """
    if x.dim() == 3:
        return convolve(x[None], weight, bias, stride, padding, dilation, groups)[0]
    dtype, dilation = product_type(x), _dilation(weight, dilation)
    zeros, columns = _columns(x, weight, stride, padding, dilation)
    if _overruns(dtype, weight, stride, padding):
        x, stride = _picked(x, stride), 1
    elif _skips_rows(dtype, weight, stride, padding):
        x = _read_rows(x, weight.shape[2], stride, padding, dilation)
        stride = [weight.shape[2], pair(stride)[1]]
        padding, dilation = [0, zeros], [1, pair(dilation)[1]]
    how: tuple[Any, ...] = (stride, padding, dilation, groups)
    if lacks_bf16(x, dtype) or _fails(x, dtype, weight, stride, columns):
        return run_wide(torch.conv2d, (x, weight, bias), how, dtype)
    if not is_slow_back(x, dtype):
        return torch.conv2d(x, weight, bias, *how)
    x, pads = numeric_padding(x, weight, padding, dilation)
    apart = pair(stride), pair(dilation), groups

    def back(operands: Operands, mask: list[bool]) -> Any:
        return convolve_backward(*operands, pads, apart, mask)

    how = (stride, pads, dilation, groups)
    return with_wide_gradients(torch.conv2d, (x, weight, bias), how, back)


@SUBSTITUTES.register("conv_transpose2d")
def convolve_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size,
    output_padding: Size,
    groups: int,
    dilation: Size,
) -> Tensor:
    """Returns the transposed convolution of (n, C, h, w) with (C, K / groups, rows, cols).

    The batch may be absent. Under autocast the arithmetic and the result are of autocast's type.
    """
    how = (stride, padding, output_padding, groups, dilation)
    if x.dim() == 3:
        return convolve_transposed(x[None], weight, bias, *how)[0]
    dtype, skipped = product_type(x), pair(stride)[0] - weight.shape[2]
    if dtype != torch.float64 and skipped > 0 and by_onednn(x):
        # The gradient of x is a convolution whose row stride is above the kernel's rows.
        weight = torch.nn.functional.pad(weight, (0, 0, 0, skipped))
        longer = convolve_transposed(x, weight, bias, *how)
        kept = longer[:, :, : longer.shape[2] - skipped * pair(dilation)[0]]
        return kept.contiguous(memory_format=torch.channels_last)
    if _fails(x, dtype, weight, stride, x.shape[3]):
        return run_wide(torch.conv_transpose2d, (x, weight, bias), how, dtype)
    operation = with_exact_sums(torch.conv_transpose2d, x, dtype)
    if not is_slow_back(x, dtype):
        return operation(x, weight, bias, *how)
    rest = pair(stride), pair(padding), pair(dilation), True, pair(output_padding), groups
    back = plain_backward(weight, rest)
    return with_wide_gradients(operation, (x, weight, bias), how, back)


def convolve_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    padding: list[int],
    how: tuple[list[int], list[int], int],
    mask: list[bool],
) -> Any:
    """Returns the gradients of input, weight and bias that the mask selects, None for the others.

    ``grad`` is that of the convolution, (n, K, rows, cols), of the type of ``x`` and ``weight``;
    ``padding`` the rows and columns of zeros at each side; ``how`` stride, dilation and groups.
    """
    stride, dilation, groups = how
    dtype, dilation = x.dtype, _dilation(weight, dilation)
    wide = _fails(x, dtype, weight, stride, grad.shape[3])
    if wide or lacks_bf16(x, dtype) or (dtype == torch.float16 and by_onednn(x)):
        operands = grad.float(), x.float(), weight.float()
        grads = convolve_backward(*operands, padding, how, mask)
        return tuple(None if g is None else g.to(dtype) for g in grads)
    if _overruns(dtype, weight, stride, padding):
        picked = _picked(x, stride).contiguous(memory_format=torch.channels_last)
        once = ([1, 1], dilation, groups)
        grad_picked, *others = convolve_backward(grad, picked, weight, padding, once, mask)
        grad_x = None
        if grad_picked is not None:
            grad_x = torch.zeros_like(x, memory_format=torch.channels_last)
            _picked(grad_x, stride).copy_(grad_picked)
        return grad_x, others[0], others[1]
    rest = stride, padding, dilation, False, [0, 0], groups, mask
    return torch.ops.aten.convolution_backward(grad, x, weight, [weight.shape[0]], *rest)


def is_safe(x: Tensor, weight: Tensor, stride: Size, padding: Size | str, dilation: Size) -> bool:
    """Whether oneDNN computes a convolution of a batch without a fault."""
    dtype, (_, columns) = product_type(x), _columns(x, weight, stride, padding, dilation)
    return not (
        _overruns(dtype, weight, stride, padding)
        or _skips_rows(dtype, weight, stride, padding)
        or _fails(x, dtype, weight, stride, columns)
    )


def _columns(
    x: Tensor, weight: Tensor, stride: Size, padding: Size | str, dilation: Size
) -> tuple[int, int]:
    # The columns of zeros at each side, and those of the result.
    zeros = 0 if isinstance(padding, str) else pair(padding)[1]  # "same" takes no stride
    reach = pair(dilation)[1] * (weight.shape[3] - 1) + 1
    return zeros, (x.shape[3] + 2 * zeros - reach) // pair(stride)[1] + 1


def _dilation(weight: Tensor, dilation: Size) -> Any:
    # For 1x1 kernels in fp32 ATen chooses a matrix product at half the speed of oneDNN, unless they
    # are dilated, which changes nothing in a 1x1 kernel.
    small = tuple(weight.shape[2:]) == (1, 1) and weight.dtype == torch.float32
    return [2, 2] if small and by_onednn(weight) else dilation


def _fails(x: Tensor, dtype: torch.dtype, weight: Tensor, stride: Size, columns: int) -> bool:
    # The first fault: one output column in half precision.
    half = dtype in HALF and by_onednn(x)
    return half and columns == 1 and pair(stride)[1] > 1 and weight.shape[3] > 1


def _overruns(dtype: torch.dtype, weight: Tensor, stride: Size, padding: Size | str) -> bool:
    # The second fault: strided 1x1 kernels in fp32.
    narrow = dtype == torch.float32 and weight.shape[1] < BLOCK
    strided = tuple(pair(stride)) != (1, 1) and is_pointwise(weight, padding)
    return narrow and strided and by_onednn(weight)


def _skips_rows(dtype: torch.dtype, weight: Tensor, stride: Size, padding: Size | str) -> bool:
    # The third fault: row strides above the rows of the kernel. 1x1 kernels without padding take
    # another way through the library.
    if dtype == torch.float64 or not by_onednn(weight) or isinstance(padding, str):
        return False
    return pair(stride)[0] > weight.shape[2] and not is_pointwise(weight, padding)


def is_pointwise(weight: Tensor, padding: Size | str) -> bool:
    """Whether a kernel is of one pixel, without a border."""
    unpadded = not isinstance(padding, str) and tuple(pair(padding)) == (0, 0)
    return unpadded and tuple(weight.shape[2:]) == (1, 1)


def _read_rows(x: Tensor, rows: int, stride: Size, padding: Size | str, dilation: Size) -> Tensor:
    # The rows that a kernel of so many rows reads, in order, for one output after another; zeros
    # above and below the map are among them.
    assert not isinstance(padding, str)
    step, zeros, apart = pair(stride)[0], pair(padding)[0], pair(dilation)[0]
    x = torch.nn.functional.pad(x, (0, 0, zeros, zeros)) if zeros else x
    num_outputs = (x.shape[2] - apart * (rows - 1) - 1) // step + 1
    first = torch.arange(0, num_outputs * step, step, device=x.device)
    read = (first[:, None] + torch.arange(0, rows * apart, apart, device=x.device)).flatten()
    return x.index_select(2, read).contiguous(memory_format=torch.channels_last)


def _picked(x: Tensor, stride: Size) -> Tensor:
    rows, columns = pair(stride)
    return x[:, :, ::rows, ::columns]
