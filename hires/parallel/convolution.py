"""Computes convolutions as torch does, without three faults of oneDNN, and 1x1 kernels faster.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hires.core.registry import Registry
from hires.plan.operators.operator_table import pair

HALF = (torch.bfloat16, torch.float16)
BLOCK = 16  # channels that the library pads a weight to

Size = int | Sequence[int]

SUBSTITUTES: Registry[Callable[..., Tensor]] = Registry("substitute")
"""ATen name -> the function of the same arguments that is called in place of torch's own."""


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

    Under autocast the arithmetic and the result are of autocast's type.
    """
    dtype, dilation = product_type(x), _dilation(weight, dilation)
    zeros = 0 if isinstance(padding, str) else pair(padding)[1]  # "same" takes no stride
    reach = pair(dilation)[1] * (weight.shape[3] - 1) + 1
    columns = (x.shape[3] + 2 * zeros - reach) // pair(stride)[1] + 1
    if _overruns(dtype, weight, stride, padding):
        x, stride = _picked(x, stride), 1
    elif _skips_rows(dtype, weight, stride, padding):
        x = _read_rows(x, weight.shape[2], stride, padding, dilation)
        stride = [weight.shape[2], pair(stride)[1]]
        padding, dilation = [0, zeros], [1, pair(dilation)[1]]
    how: tuple[Any, ...] = (stride, padding, dilation, groups)
    wide = _fails(x, dtype, weight, stride, columns)
    return _run(torch.conv2d, (x, weight, bias), how, dtype if wide else None)


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

    Under autocast the arithmetic and the result are of autocast's type.
    """
    dtype, skipped = product_type(x), pair(stride)[0] - weight.shape[2]
    how = (stride, padding, output_padding, groups, dilation)
    if dtype != torch.float64 and skipped > 0 and _by_onednn(x):
        # The gradient of x is a convolution whose row stride is above the kernel's rows.
        weight = torch.nn.functional.pad(weight, (0, 0, 0, skipped))
        longer = convolve_transposed(x, weight, bias, *how)
        kept = longer[:, :, : longer.shape[2] - skipped * pair(dilation)[0]]
        return kept.contiguous(memory_format=torch.channels_last)
    wide = _fails(x, dtype, weight, stride, x.shape[3])
    return _run(torch.conv_transpose2d, (x, weight, bias), how, dtype if wide else None)


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
    if _overruns(dtype, weight, stride, padding):
        picked = _picked(x, stride).contiguous(memory_format=torch.channels_last)
        once = ([1, 1], dilation, groups)
        grad_picked, *others = convolve_backward(grad, picked, weight, padding, once, mask)
        grad_x = None
        if grad_picked is not None:
            grad_x = torch.zeros_like(x, memory_format=torch.channels_last)
            _picked(grad_x, stride).copy_(grad_picked)
        return grad_x, others[0], others[1]
    wide = _fails(x, dtype, weight, stride, grad.shape[3])
    if wide:
        grad, x, weight = grad.float(), x.float(), weight.float()
    rest = stride, padding, dilation, False, [0, 0], groups, mask
    grads: Any = torch.ops.aten.convolution_backward(grad, x, weight, [weight.shape[0]], *rest)
    if wide:
        grads = tuple(None if g is None else g.to(dtype) for g in grads)
    return grads


def product_type(x: Tensor) -> torch.dtype:
    """Returns the type in which products with a tensor are computed: autocast may lower it."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def _by_onednn(x: Tensor) -> bool:
    # The simulated device computes on the CPU.
    return x.device.type in ("cpu", "simulated")


def _dilation(weight: Tensor, dilation: Size) -> Any:
    # For 1x1 kernels in fp32 ATen chooses a matrix product at half the speed of oneDNN, unless they
    # are dilated, which changes nothing in a 1x1 kernel.
    small = tuple(weight.shape[2:]) == (1, 1) and weight.dtype == torch.float32
    return [2, 2] if small and _by_onednn(weight) else dilation


def _fails(x: Tensor, dtype: torch.dtype, weight: Tensor, stride: Size, columns: int) -> bool:
    # The first fault: one output column in half precision.
    half = dtype in HALF and _by_onednn(x)
    return half and columns == 1 and pair(stride)[1] > 1 and weight.shape[3] > 1


def _overruns(dtype: torch.dtype, weight: Tensor, stride: Size, padding: Size | str) -> bool:
    # The second fault: strided 1x1 kernels in fp32.
    narrow = dtype == torch.float32 and weight.shape[1] < BLOCK
    strided = tuple(pair(stride)) != (1, 1) and _is_pointwise(weight, padding)
    return narrow and strided and _by_onednn(weight)


def _skips_rows(dtype: torch.dtype, weight: Tensor, stride: Size, padding: Size | str) -> bool:
    # The third fault: row strides above the rows of the kernel. 1x1 kernels without padding take
    # another way through the library.
    if dtype == torch.float64 or not _by_onednn(weight) or isinstance(padding, str):
        return False
    return pair(stride)[0] > weight.shape[2] and not _is_pointwise(weight, padding)


def _is_pointwise(weight: Tensor, padding: Size | str) -> bool:
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


def _run(
    operation: Callable[..., Tensor],
    operands: tuple[Tensor, Tensor, Tensor | None],
    how: tuple[Any, ...],
    narrow: torch.dtype | None,
) -> Tensor:
    # With a narrow type the arithmetic is in fp32. The operands are rounded to that type first: the
    # products are exact in fp32.
    if narrow is None:
        return operation(*operands, *how)
    wide = [None if t is None else t.to(narrow).float() for t in operands]
    with torch.autocast(operands[0].device.type, enabled=False):
        return operation(*wide, *how).to(narrow)
