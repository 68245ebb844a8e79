"""Operations that look at the whole image: sums over the tiles, and values that all tiles share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.parallel.cursor import Cursor


class SumOverTiles(torch.autograd.Function):
    """Partial sums -> the sum on all tiles.

    What follows is computed alike on all tiles, so its gradient is complete on each of them and
    goes to the tile's own partial sum as it is.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, cursor: Cursor, node: str) -> Tensor:
        """Returns the sum, added in rank order so that all tiles get the same bits."""
        return cursor.gather(partial.contiguous(), node).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient needs no message."""
        return grad, None, None


class Share(torch.autograd.Function):
    """A value that all tiles hold, about to be used with each tile's own pixels.

    Every tile sees only the part of its gradient that its pixels make; the parts are summed.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, cursor: Cursor, node: str) -> Tensor:
        """Returns the value."""
        ctx.cursor, ctx.node = cursor, node
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Returns the sum of the tiles' gradients."""
        return ctx.cursor.gather(grad.contiguous(), ctx.node, back=True).sum(0), None, None


def mean_over_image(x: Tensor, cursor: Cursor, node: str, pixels: int) -> Tensor:
    """Returns the mean over rows and columns of the whole image, on all tiles.

    Args:
        x: this rank's tile, (n, C, h, w); it may hold no pixel.
        cursor: of the rank.
        node: the pool.
        pixels: H * W of the whole map.

    Returns:
        (n, C, 1, 1).
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    partial = x.sum((2, 3), keepdim=True, dtype=wide)
    total: Tensor = SumOverTiles.apply(partial, cursor, node)  # type: ignore[no-untyped-call]
    return (total / pixels).to(x.dtype)


def share(whole: Tensor, cursor: Cursor, node: str) -> Tensor:
    """Returns a value that all tiles hold, about to be used by a node; its gradient is summed."""
    return Share.apply(whole, cursor, node)  # type: ignore[no-any-return,no-untyped-call]
