"""Computes convolutions of one and of three dims as torch does, without the faults of oneDNN.

One dim is a map of one row, as in torch itself. In three dims the library fails in half precision
on processors with AMX, as in two where the output has one column, and also

    depth 1, the kernel deeper    outputs are wrong; where every plane that is read lies outside
                                  the map, the process dies
    stride > depth of the kernel  outputs are wrong, memory is overwritten

Such maps are small or shallow; they are computed in fp32 from the same rounded numbers. Measured on
torch 2.13 over 7,000 random bf16 convolutions: no other shape failed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.parallel.convolution import SUBSTITUTES, convolve, convolve_transposed
from hires.parallel.wide_convolution import (
    HALF,
    Size,
    by_onednn,
    is_slow_back,
    numeric_padding,
    per_dim,
    plain_backward,
    product_type,
    run_wide,
    with_exact_sums,
    with_wide_gradients,
)


@SUBSTITUTES.register("conv1d")
def convolve_line(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
) -> Tensor:
    """Returns the convolution of (n, C, l) or (C, l) with (K, C / groups, size), as torch's."""
    if not isinstance(padding, str):
        padding = _row(padding, 0)
    how = _row(stride), padding, _row(dilation), groups
    return convolve(x.unsqueeze(-2), weight.unsqueeze(-2), bias, *how).squeeze(-2)


@SUBSTITUTES.register("conv_transpose1d")
def convolve_line_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size,
    output_padding: Size,
    groups: int,
    dilation: Size,
) -> Tensor:
    """Returns the transposed convolution of (n, C, l) or (C, l) with (C, K / groups, size)."""
    how = _row(stride), _row(padding, 0), _row(output_padding, 0), groups, _row(dilation)
    return convolve_transposed(x.unsqueeze(-2), weight.unsqueeze(-2), bias, *how).squeeze(-2)


@SUBSTITUTES.register("conv3d")
def convolve_volume(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
) -> Tensor:
    """Returns the convolution of (n, C, d, h, w) with (K, C / groups, depth, rows, cols).

    The batch may be absent. Under autocast the arithmetic and the result are of autocast's type.
    """
    if x.dim() == 4:
        return convolve_volume(x[None], weight, bias, stride, padding, dilation, groups)[0]
    dtype = product_type(x)
    if dtype not in HALF or not by_onednn(x):
        how: tuple[Any, ...] = (stride, padding, dilation, groups)
        return torch.conv3d(x, weight, bias, *how)
    x, padding = numeric_padding(x, weight, padding, dilation)
    stride, dilation = per_dim(stride, 3), per_dim(dilation, 3)
    reach = dilation[2] * (weight.shape[4] - 1) + 1
    columns = (x.shape[4] + 2 * padding[2] - reach) // stride[2] + 1
    if _fails(weight, stride, x.shape[2], columns):
        return run_wide(torch.conv3d, (x, weight, bias), (stride, padding, dilation, groups), dtype)
    if not is_slow_back(x, dtype):
        return torch.conv3d(x, weight, bias, stride, padding, dilation, groups)
    back = plain_backward(weight, (stride, padding, dilation, False, [0, 0, 0], groups))
    how = stride, padding, dilation, groups
    return with_wide_gradients(torch.conv3d, (x, weight, bias), how, back)


@SUBSTITUTES.register("conv_transpose3d")
def convolve_volume_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size,
    output_padding: Size,
    groups: int,
    dilation: Size,
) -> Tensor:
    """Returns the transposed convolution of (n, C, d, h, w) with (C, K / groups, *size).

    The batch may be absent. Under autocast the arithmetic and the result are of autocast's type.
    """
    how = stride, padding, output_padding, groups, dilation
    if x.dim() == 4:
        return convolve_volume_transposed(x[None], weight, bias, *how)[0]
    dtype = product_type(x)
    if dtype not in HALF or not by_onednn(x):
        return torch.conv_transpose3d(x, weight, bias, *how)
    stride, padding, dilation = (per_dim(one, 3) for one in (stride, padding, dilation))
    output_padding = per_dim(output_padding, 3)
    reach = dilation[0] * (weight.shape[2] - 1) + 1
    depth = (x.shape[2] - 1) * stride[0] - 2 * padding[0] + reach + output_padding[0]
    if _fails(weight, stride, depth, x.shape[4]):  # the gradient of x is a convolution
        return run_wide(torch.conv_transpose3d, (x, weight, bias), how, dtype)
    operation = with_exact_sums(torch.conv_transpose3d, x, dtype)
    if not is_slow_back(x, dtype):
        return operation(x, weight, bias, *how)
    back = plain_backward(weight, (stride, padding, dilation, True, output_padding, groups))
    return with_wide_gradients(operation, (x, weight, bias), how, back)


def _fails(weight: Tensor, stride: list[int], depth: int, columns: int) -> bool:
    # ``depth`` is that of the larger map, ``columns`` those of the smaller one.
    planes, _, across = weight.shape[2:]
    narrow = columns == 1 and stride[2] > 1 and across > 1
    return narrow or (depth == 1 and planes > 1) or stride[0] > planes


def _row(size: Size, other: int = 1) -> list[int]:
    # An argument of one dim, as that of a map of one row.
    return [other, *per_dim(size, 1)]
