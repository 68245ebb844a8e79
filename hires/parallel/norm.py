"""Batch normalisation of an image in tiles: the statistics are those of the whole image.

Every tile computes mean and variance of its own pixels; the tiles exchange them in one message and
combine them with the parallel variance formula, which does not cancel as sums of squares do.

Source:
    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.comm import Group, all_gather


@dataclass
class NormTiles:
    """Who normalises together."""

    group: Group
    counts: list[int]
    """Pixels times samples that each tile holds."""


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
        mean, var = _combine(_local_statistics(x), tiles)
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
            total = all_gather(sums, ctx.tiles.group).sum(0)
            grad_x = _gradient_of_input(grad, x, weight, mean, invstd, total, ctx.tiles)
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
        tiles: who normalises together.
        momentum: weight of this batch in the running statistics.
        eps: added to the variance.
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = x.new_ones(x.shape[1], dtype=kind) if weight is None else weight
    offset = x.new_zeros(x.shape[1], dtype=kind) if bias is None else bias
    y, mean, var = TiledBatchNorm.apply(x, scale, offset, tiles, eps)
    if running is not None:
        count = sum(tiles.counts)
        with torch.no_grad():
            running[0].lerp_(mean.to(running[0].dtype), momentum)
            running[1].lerp_((var * (count / (count - 1))).to(running[1].dtype), momentum)
    return y  # type: ignore[no-any-return]


def _local_statistics(x: Tensor) -> Tensor:
    """Returns mean and biased variance of this tile's pixels, (2, C)."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not x.numel():
        return x.new_zeros(2, x.shape[1], dtype=kind)
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return torch.stack((mean, var)).to(kind)


def _combine(local: Tensor, tiles: NormTiles) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance of the whole image from those of the tiles."""
    gathered = all_gather(local, tiles.group)  # (tiles, 2, C)
    share = gathered.new_tensor(tiles.counts).div_(sum(tiles.counts)).view(-1, 1)
    means, variances = gathered[:, 0], gathered[:, 1]
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0)


def _gradient_sums(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor
) -> Tensor:
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
    weight: Tensor,
    mean: Tensor,
    invstd: Tensor,
    total: Tensor,
    tiles: NormTiles,
) -> Tensor:
    """Returns weight * invstd * (grad - mean(grad) - xhat * mean(grad * xhat)).

    Written as a * grad + (b * x + c) with one number per channel each, so that two passes over the
    tile do it: batch_norm with mean 0 and variance 1 is the fused b * x + c.
    """
    if not x.numel():
        return torch.zeros_like(x)
    total = total / sum(tiles.counts)
    a = weight.to(mean.dtype) * invstd
    b = -a * invstd * total[0]
    c = -a * total[1] - b * mean
    zero, one = torch.zeros_like(mean), torch.ones_like(mean)
    result = F.batch_norm(x, zero, one, b, c, False, 0.0, 0.0)
    return result.addcmul_(grad, a.to(grad.dtype).view(1, -1, 1, 1))
