"""Pools unsigned numbers of 8 bits: torch's kernel for maxima of them takes no large maps."""

from __future__ import annotations

import torch
from torch import Tensor


def max_pool_int8(
    x: Tensor, size: list[int], stride: list[int], padding: list[int], dilation: list[int],
    *, ceil_mode: bool,
) -> Tensor:  # fmt: skip
    """Returns the largest uint8 of each window of (n, C, H, W), one dim after the other.

    Each argument holds rows and columns. Numbers around the image are 0.
    """
    for dim, k, s, p, d in zip((2, 3), size, stride, padding, dilation, strict=True):
        length, reach = x.shape[dim] + 2 * p, d * (k - 1) + 1
        count = -(-(length - reach) // s) + 1 if ceil_mode else (length - reach) // s + 1
        if (count - 1) * s >= x.shape[dim] + p:  # a window that begins behind the image is none
            count -= 1
        x = _largest(x, dim, count, [tap * d - p for tap in range(k)], s)
    return x


def _largest(x: Tensor, dim: int, count: int, taps: list[int], step: int) -> Tensor:
    # The maxima of rows ``tap + step * o`` for each of ``count`` outputs o. No border is copied:
    #
    #     kernel 3, stride 2, padding 1     tap  0    rows  0 2 4 6    for all outputs
    #                                       tap  1          1 3 5 7    for all
    #                                       tap -1            1 3 5    from output 1 on
    whole, parts = [], []
    for tap in taps:
        first, end = max(0, -(tap // step)), min(count, -(-(x.shape[dim] - tap) // step))
        if first < end:
            rows = _every(x, dim, first * step + tap, end - first, step)
            everywhere = (first, end) == (0, count)
            whole.append(rows) if everywhere else parts.append((first, rows))
    if not whole:
        shape = [count if one == dim else size for one, size in enumerate(x.shape)]
        most = torch.zeros(shape, dtype=x.dtype, device=x.device)
        most = most.contiguous(memory_format=torch.channels_last)
    elif len(whole) == 1:
        most = whole[0].clone(memory_format=torch.channels_last) if parts else whole[0]
    else:
        most = torch.maximum(*whole[:2])
    for rows in whole[2:]:
        torch.maximum(most, rows, out=most)
    for first, rows in parts:
        part = most.narrow(dim, first, rows.shape[dim])
        torch.maximum(part, rows, out=part)
    return most


def _every(x: Tensor, dim: int, first: int, count: int, step: int) -> Tensor:
    rows = x.narrow(dim, first, (count - 1) * step + 1)
    return rows[:, :, ::step] if dim == 2 else rows[..., ::step]
