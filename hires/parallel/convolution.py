"""Which convolutions does the processor's library get wrong, and what is computed instead?

On processors with AMX, oneDNN reads memory that it never wrote where a convolution in half
precision steps by two or more columns, has a kernel of two or more, and makes an output of one
column: outputs and gradients of weights are then wrong, differ from run to run and may be NaN.
Narrow tiles of deep layers are of that shape. They are small, so they are computed in fp32 from the
same rounded numbers. Measured on torch 2.13 over 16,000 random convolutions, where no other shape
failed; a relative of the fault is https://github.com/pytorch/pytorch/issues/169688.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hires.plan.rules import pair

HALF = (torch.bfloat16, torch.float16)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
) -> Tensor:
    """Returns the convolution of (n, C, h, w) with (K, C / groups, rows, cols), as torch's.

    Under autocast the arithmetic and the result are of autocast's type.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    if not _fails(x, dtype, weight, stride, padding, dilation):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    x, weight = x.to(dtype).float(), weight.to(dtype).float()
    if bias is not None:
        bias = bias.to(dtype).float()
    with torch.autocast(device, enabled=False):
        wide = torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return wide.to(dtype)


def convolve_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    padding: list[int],
    how: tuple[list[int], list[int], int],
    mask: list[bool],
) -> tuple[Tensor | None, Any, Tensor | None]:
    """Returns the gradients of input, weight and bias that the mask asks for, None for the others.

    Args:
        grad: gradient of the convolution, (n, K, rows, cols).
        x: its input, (n, C, h, w), of the same type.
        weight: its kernel, of the same type.
        padding: rows and columns of zeros at each side.
        how: stride, dilation (rows and columns each) and groups.
        mask: whether input, weight and bias want theirs.
    """
    stride, dilation, groups = how
    dtype = x.dtype
    wide = _fails(x, dtype, weight, stride, padding, dilation)
    if wide:
        grad, x, weight = grad.float(), x.float(), weight.float()
    found: tuple[Tensor | None, Any, Tensor | None] = torch.ops.aten.convolution_backward(
        *(grad, x, weight, [weight.shape[0]]),
        *(stride, padding, dilation, False, [0, 0], groups, mask),
    )
    if not wide:
        return found
    grad_x, grad_weight, grad_bias = (None if g is None else g.to(dtype) for g in found)
    return grad_x, grad_weight, grad_bias


def _fails(
    x: Tensor,
    dtype: torch.dtype,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
) -> bool:
    """Whether a convolution is of the shape that may come out wrong."""
    step, kernel = pair(stride)[1], weight.shape[3]
    if dtype not in HALF or x.device.type != "cpu" or step == 1 or kernel == 1:
        return False
    zeros = 0 if isinstance(padding, str) else pair(padding)[1]  # "same" takes no stride
    reach = pair(dilation)[1] * (kernel - 1) + 1
    return (x.shape[3] + 2 * zeros - reach) // step == 0
