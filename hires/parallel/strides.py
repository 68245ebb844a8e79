"""Computes operators that depend on the order of a tensor in memory, whatever that order is.

A network is traced with images in the usual order (n, C, H, W), and a rank holds them
channels-last, so a ``view`` that was possible need not be:

    traced    x.view(n, C * H * W)    the numbers of a sample in a row
    held      n, H, W, C              C is the fastest: the view is made of a copy
"""

from __future__ import annotations

import torch
from torch import Tensor

from hires.parallel.convolution import SUBSTITUTES


@SUBSTITUTES.register("view")
@SUBSTITUTES.register("_unsafe_view")
def view(x: Tensor, size: list[int] | torch.dtype) -> Tensor:
    """Returns the numbers in another shape, or the bytes as another type."""
    return x.contiguous().view(size) if isinstance(size, torch.dtype) else x.reshape(size)


@SUBSTITUTES.register("view_as_complex")
def view_as_complex(x: Tensor) -> Tensor:
    """Returns pairs of numbers, which must lie side by side, as complex ones."""
    return torch.view_as_complex(x.contiguous())


@SUBSTITUTES.register("as_strided")
def as_strided(
    x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> Tensor:
    """Returns numbers at given places of a tensor that was traced in contiguous order."""
    return x.contiguous().as_strided(size, stride, storage_offset or 0)


@SUBSTITUTES.register("kron")
def kron(x: Tensor, other: Tensor) -> Tensor:
    """Returns the Kronecker product, which torch computes by a view of both."""
    return torch.kron(x.contiguous(), other.contiguous())
