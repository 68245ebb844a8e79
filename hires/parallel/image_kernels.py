"""Holds what operators over the image share: types, values that all tiles hold, and moments.

Source:
    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hires.parallel.cursor import Cursor

Values = dict[str, Any]  # the values of a pass by the names of their nodes
Operator = Callable[[Values], Any]  # computes the value of a node
Bind = Callable[[Values], dict[str, Any]]  # collects the arguments of a node by name


class _Share(torch.autograd.Function):
    # All tiles hold a value, and use it with their own pixels; each makes only the part of its
    # gradient that its pixels cause, so the parts are summed.
    @staticmethod
    def forward(ctx: Any, x: Tensor, cursor: Cursor, node: str) -> Tensor:
        ctx.cursor, ctx.node = cursor, node
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        parts = ctx.cursor.gather(grad.contiguous().to(wide(grad)), ctx.node, back=True)
        return parts.sum(0).to(grad.dtype), None, None


def share(whole: Tensor, cursor: Cursor, node: str) -> Tensor:
    """Returns a value that all tiles hold, about to be used by a node; its gradient is summed."""
    return _Share.apply(whole, cursor, node)  # type: ignore[no-any-return,no-untyped-call]


def wide(x: Tensor) -> torch.dtype:
    """Returns a type for sums over millions of pixels: half precision would lose all digits."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def combine_moments(parts: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of all numbers from those of each part, (parts, 2, ...).

    ``shares``: each part's share of the numbers, (parts,).
    """
    means, variances = parts.unbind(1)
    shares = shares.to(means.dtype).view(-1, *[1] * (means.dim() - 1))
    # Products and sums, not a matrix product, which autocast would lower to bfloat16.
    mean = (shares * means).sum(0)
    apart = means - mean
    return mean, (shares * torch.addcmul(variances, apart, apart)).sum(0)
