r"""Computes batch norm, which needs the statistics of all tiles or shards, and shares values.

Norms of each sample are in :mod:`hires.parallel.sample_norms`, sums and maxima of the image in
:mod:`hires.parallel.reductions`. All are registered here under their ATen names.

Batch normalisation in training has the statistics of the whole microbatch. Every tile computes mean
and variance of its own pixels; the tiles exchange them in one message and combine them with the
parallel variance formula, which does not cancel as sums of squares do:

    tile 0   mean 0, var 0 \            mean = sum of share t * mean t
                            > gather
    tile 1   mean 1, var 1 /            var  = sum of share t * (var t + (mean t - mean)^2)

The statistics depend on every pixel, so the gradient of a pixel has a term of the whole image:

    grad_x = a * (grad - mean(grad) - xhat * mean(grad * xhat)),  a = weight / sqrt(var + eps)

Both means are over all tiles: one more message, on the way back. Weight and bias need none here:
their sums over the tile are parts of the gradient, which are summed at the end of the step.

Source:
    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.halo import part
from hires.plan.graph import Node, Rect
from hires.plan.layout import held_by

Values = dict[str, Any]  # the values of a pass by the names of their nodes
Operator = Callable[[Values], Any]  # computes the value of a node
Bind = Callable[[Values], dict[str, Any]]  # collects the arguments of a node by name

IMAGE_KERNELS: Registry[Callable[[Node, Context, Bind], Operator]] = Registry("image kernel")
"""ATen name -> makes the callable of a node whose rule is ``norm`` or ``reduce``."""


@IMAGE_KERNELS.register("batch_norm")
def _batch_norm(node: Node, context: Context, bind: Bind) -> Operator:
    source = node.inputs[0]
    shape = context.plan.graph.shape(source)
    boxes = held_by(context.plan.graph, context.stage, source)
    counts = [(b.n1 - b.n0) * (b.r1 - b.r0) * (b.c1 - b.c0) for b in boxes]
    if len(shape) != 4:  # shards of a vector or a sequence; tiles are of images
        counts = [count * math.prod(shape[2:]) for count in counts]
    tiles = NormTiles.of(node, context, counts)
    unbiased = tiles.count / max(tiles.count - 1, 1)

    def run(values: Values) -> Tensor:
        args = bind(values)
        x, weight, bias, momentum = args["input"], args["weight"], args["bias"], args["momentum"]
        weight = x.new_ones(x.shape[1], dtype=wide(x)) if weight is None else weight
        bias = x.new_zeros(x.shape[1], dtype=wide(x)) if bias is None else bias
        apply = _TiledBatchNorm.apply
        y, mean, var = apply(x, weight, bias, tiles, args["eps"])  # type: ignore[no-untyped-call]
        if args["running_mean"] is not None and not context.recomputing:
            with torch.no_grad():
                args["running_mean"].mul_(1 - momentum).add_(mean, alpha=momentum)
                args["running_var"].mul_(1 - momentum).add_(var, alpha=momentum * unbiased)
        return y  # type: ignore[no-any-return]

    return run


class NormTiles:
    """The ranks that normalise one value together.

    Args:
        cursor: the place in the events of a step.
        node: the norm.
        counts: numbers of each mean that each tile or shard owns, in the order of ranks.
        rects: what this tile holds and what it owns, if that is less. All held pixels are
            normalised, but each counts once: with its owner.
    """

    def __init__(
        self, cursor: Cursor, node: str, counts: list[int], rects: tuple[Rect, Rect] | None
    ) -> None:
        self.cursor, self.node, self.rects = cursor, node, rects
        self.count = sum(counts)
        self._shares = (torch.tensor(counts, dtype=torch.float64) / self.count).view(-1, 1)
        self._constants: dict[torch.dtype, Tensor] = {}

    @classmethod
    def of(cls, node: Node, context: Context, counts: list[int]) -> NormTiles:
        """Returns them for a node of this rank; ``counts`` by tile or shard."""
        size, rects = context.plan.graph.shape(node.inputs[0])[2:], None
        if context.stage.num_tiles > 1 and context.extent(node.name) != context.own(size):
            rects = context.extent(node.name), context.own(size)
        counts = [counts[tile] for tile in tiles_of_ranks(context)]
        return cls(context.cursor, node.name, counts, rects)

    def own(self, x: Tensor) -> Tensor:
        """Returns the pixels that count."""
        return x if self.rects is None else part(x, *self.rects)

    def shares(self, like: Tensor) -> Tensor:
        """Returns each tile's part of the image, (tiles, 1), made once for each type."""
        if like.dtype not in self._constants:
            self._constants[like.dtype] = self._shares.to(like)
        return self._constants[like.dtype]


class _TiledBatchNorm(torch.autograd.Function):
    # (n, C, h, w) -> normalised tile, and mean and variance (C) of the whole image.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, tiles: NormTiles, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        own, kind = tiles.own(x), wide(x)
        if own.numel():
            local = torch.stack(torch.batch_norm_update_stats(own, None, None, 0.0)).to(kind)
        else:  # a tile without pixels has the share 0
            local = x.new_zeros(2, x.shape[1], dtype=kind)
        means, variances = tiles.cursor.gather(local, tiles.node).unbind(1)  # (tiles, C) each
        shares = tiles.shares(means)
        # Products and sums, not a matrix product, which autocast would lower to bfloat16.
        mean = (shares * means).sum(0)
        apart = means - mean
        var = (shares * torch.addcmul(variances, apart, apart)).sum(0)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps) if x.numel() else x.clone()
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.tiles = tiles
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _mean: Tensor, _var: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, invstd = ctx.saved_tensors
        tiles: NormTiles = ctx.tiles
        # Sums over this tile of grad * xhat and of grad, (2, C): the gradients of weight and bias.
        if x.numel():
            _, *both = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, None, None, mean, invstd, True, 0.0, [False, True, True]
            )
            sums = torch.stack(both).to(mean.dtype)
        else:
            sums = mean.new_zeros(2, x.shape[1])
        grad_x = None
        if ctx.needs_input_grad[0]:
            total = tiles.cursor.gather(sums, tiles.node, back=True).sum(0)
            grad_x = _gradient_of_input(ctx, grad, total)
        return grad_x, sums[0].to(weight.dtype), sums[1].to(weight.dtype), None, None


def _gradient_of_input(ctx: Any, grad: Tensor, total: Tensor) -> Tensor:
    # a * (grad - mean(grad) - xhat * mean(grad * xhat)), with a = weight * invstd. ``total`` holds
    # the sums over all tiles of grad * xhat and of grad, from every pixel that a tile holds. As
    # xhat = (x - mean) * invstd, the result is linear in x, with one number per channel each:
    #
    #     a * grad + b * x + c      b = -a * invstd * mean(grad * xhat)
    #                               c = -a * mean(grad) - b * mean
    #
    # so two passes over the tile do it: batch_norm with mean 0 and variance 1 is the fused
    # b * x + c. The statistics are made of own pixels, so only these have the terms b and c.
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    (x, weight, mean, invstd), tiles = saved, ctx.tiles
    if not x.numel():
        return torch.zeros_like(x)
    a = weight * invstd
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


def tiles_of_ranks(context: Context) -> list[int]:
    """Returns the tile or shard of each rank of the stage: gathers stack in the order of ranks.

    The up direction has its tiles in reverse order of them.
    """
    plan = context.plan
    return [plan.slot_of(rank, context.direction).tile for rank in context.tiles.ranks]


def wide(x: Tensor) -> torch.dtype:
    """Returns a type for sums over millions of pixels: half precision would lose all digits."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
