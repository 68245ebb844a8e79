r"""Batch normalisation over tiles or shards: the statistics are those of the whole microbatch.

Every tile computes mean and variance of its own pixels; the tiles exchange them in one message and
combine them with the parallel variance formula, which does not cancel as sums of squares do:

    tile 0   mean 0, var 0 \            mean = sum of share * mean t
                            > gather
    tile 1   mean 1, var 1 /            var  = sum of share * (var t + (mean t - mean)^2)

The statistics depend on every pixel, so the gradient of a pixel has a term of the whole image:

    grad_x = a * (grad - mean(grad) - xhat * mean(grad * xhat)),  a = weight / sqrt(var + eps)

Both means are over all tiles: one more message, on the way back. Weight and bias need none here:
their sums over the tile are parts of the gradient, which are summed at the end of the step.

Where tiles hold more than their own pixels, all are normalised, but each counts once: with its
owner.

Source:
    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.parallel.cursor import Cursor
from hires.parallel.halo import part
from hires.plan.graph import Rect


class NormTiles:
    """The ranks that normalise one value together, and how much of the image each holds."""

    def __init__(
        self,
        cursor: Cursor,
        node: str,
        counts: list[int],
        rects: tuple[Rect, Rect] | None = None,
    ) -> None:
        """Takes the shares of the image.

        Args:
            cursor: of the rank.
            node: the norm.
            counts: pixels times samples that each tile or shard owns, in the order of ranks.
            rects: what this tile holds and what it owns, if that is less.
        """
        self.cursor = cursor
        self.node = node
        self.rects = rects
        self.count = sum(counts)
        self._share = (torch.tensor(counts, dtype=torch.float64) / self.count).view(-1, 1)
        self._constants: dict[torch.dtype, Tensor] = {}

    def gather(self, tensor: Tensor, back: bool = False) -> Tensor:
        """Returns a tensor of all tiles, stacked: one message forward, one on the way back."""
        return self.cursor.gather(tensor, self.node, back)

    def own(self, x: Tensor) -> Tensor:
        """Returns the tile's own pixels of those that it holds."""
        return x if self.rects is None else part(x, *self.rects)

    def share(self, like: Tensor) -> Tensor:
        """Returns each tile's part of the image, (tiles, 1), in another tensor's type."""
        if like.dtype not in self._constants:
            self._constants[like.dtype] = self._share.to(like)
        return self._constants[like.dtype]


class TiledBatchNorm(torch.autograd.Function):
    """Batch normalisation in training, over all tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        tiles: NormTiles,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(n, C, h, w) -> normalised tile, and mean and variance (C) of the whole image."""
        mean, var = _combine(_local_statistics(tiles.own(x)), tiles)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps) if x.numel() else x.clone()
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.tiles = tiles
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _mean: Tensor, _var: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Gradients of the tile, weight and bias; one message to the other tiles."""
        x, weight, mean, invstd = ctx.saved_tensors
        sums = _gradient_sums(grad, x, weight, mean, invstd)
        grad_x = None
        if ctx.needs_input_grad[0]:
            total = ctx.tiles.gather(sums, back=True).sum(0)
            grad_x = _gradient_of_input(grad, x, weight * invstd, mean, invstd, total, ctx.tiles)
        return grad_x, sums[0].to(weight.dtype), sums[1].to(weight.dtype), None, None


def tiled_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    tiles: NormTiles,
    momentum: float,
    eps: float,
) -> Tensor:
    """Returns the tile normalised with the batch statistics of the whole image.

    Args:
        x: this rank's tile, (n, C, h, w); it may hold no pixel.
        weight: scale (C), or None.
        bias: offset (C), or None.
        running: mean and variance (C) to update in place, or None.
        tiles: the ranks that normalise together.
        momentum: weight of this batch in the running statistics.
        eps: added to the variance.
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = x.new_ones(x.shape[1], dtype=kind) if weight is None else weight
    offset = x.new_zeros(x.shape[1], dtype=kind) if bias is None else bias
    apply = TiledBatchNorm.apply
    y, mean, var = apply(x, scale, offset, tiles, eps)  # type: ignore[no-untyped-call]
    if running is not None:
        unbiased = tiles.count / max(tiles.count - 1, 1)
        with torch.no_grad():
            running[0].mul_(1 - momentum).add_(mean, alpha=momentum)
            running[1].mul_(1 - momentum).add_(var, alpha=momentum * unbiased)
    return y  # type: ignore[no-any-return]


def _local_statistics(x: Tensor) -> Tensor:
    """Returns mean and biased variance of this tile's pixels, (2, C)."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not x.numel():
        return x.new_zeros(2, x.shape[1], dtype=kind)
    return torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0)).to(kind)


def _combine(local: Tensor, tiles: NormTiles) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance of the whole image from those of the tiles."""
    gathered = tiles.gather(local)  # (tiles, 2, C)
    share = tiles.share(gathered)
    # Products and sums, not a matrix product, which autocast would lower to bfloat16.
    mean = (share * gathered[:, 0]).sum(0)
    apart = gathered[:, 0] - mean
    return mean, (share * torch.addcmul(gathered[:, 1], apart, apart)).sum(0)


def _gradient_sums(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Returns the sums over this tile of grad * normalised x and of grad, (2, C)."""
    if not x.numel():
        return mean.new_zeros(2, x.shape[1])
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return torch.stack((grad_weight, grad_bias)).to(mean.dtype)


def _gradient_of_input(
    grad: Tensor,
    x: Tensor,
    a: Tensor,
    mean: Tensor,
    invstd: Tensor,
    total: Tensor,
    tiles: NormTiles,
) -> Tensor:
    """Returns a * (grad - mean(grad) - xhat * mean(grad * xhat)), with a = weight * invstd.

    The means are over the whole image, of gradients that are sums over all tiles that hold a pixel.
    They come through the statistics, so only own pixels, of which those are made, have their terms.
    Written as a * grad + (b * x + c) with one number per channel each, so that two passes over the
    tile do it: batch_norm with mean 0 and variance 1 is the fused b * x + c.
    """
    if not x.numel():
        return torch.zeros_like(x)
    pulled = total * (a / -tiles.count)  # (2, C)
    b = pulled[0] * invstd
    c = torch.addcmul(pulled[1], b, mean, value=-1)
    own, scale = tiles.own(x), a.to(grad.dtype).view(1, -1, *[1] * (x.dim() - 2))
    pull = F.batch_norm(own, torch.zeros_like(b), torch.ones_like(b), b, c, False, 0.0, 0.0)
    if tiles.rects is None:
        return pull.addcmul_(grad, scale)
    result = grad * scale
    tiles.own(result).add_(pull)
    return result
