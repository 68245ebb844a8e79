"""Pools unsigned numbers of 8 bits: torch's kernel for maxima of them takes no large maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
        behind = max(0, (count - 1) * s + reach - p - x.shape[dim])
        if p or behind:
            x = F.pad(x, (0, 0, p, behind) if dim == 2 else (p, behind))
        most = x.narrow(dim, 0, (count - 1) * s + 1)
        most = most[:, :, ::s] if dim == 2 else most[..., ::s]
        for tap in range(1, k):
            rows = x.narrow(dim, tap * d, (count - 1) * s + 1)
            most = torch.maximum(most, rows[:, :, ::s] if dim == 2 else rows[..., ::s])
        x = most
    return x
