r"""Computes batch norm, which needs the statistics of all tiles or shards.

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

Norms that do not depend on each other share both messages (:mod:`hires.plan.norm_levels`): they are
one function for autograd, which comes back to it when all their gradients are there.

    x1, x2 -> statistics of both -> [gather] -> y1, y2        x1', x2' <- [gather] <- y1', y2'

Source:
    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.image_kernels import IMAGE_KERNELS, Bind, NormTiles, Operator, Values, wide
from hires.plan.graph import Node
from hires.plan.layout import held_by


class _Norm(NamedTuple):
    bind: Bind
    tiles: NormTiles


@dataclass
class JointNorms:
    """The norms of one message; the first one that runs computes all of them."""

    cursor: Cursor
    names: list[str]
    norms: dict[str, _Norm] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)
    """Values that were computed with the first one's and not taken yet."""

    def run(self, name: str, values: Values, tracks: bool) -> Tensor:
        """Returns the value of a norm; with ``tracks`` running statistics move."""
        if name == self.names[0]:
            self.made = self._compute(values, tracks)
        return self.made.pop(name)

    def _compute(self, values: Values, tracks: bool) -> dict[str, Tensor]:
        norms = [self.norms[name] for name in self.names]
        every = [norm.bind(values) for norm in norms]
        operands: list[Tensor] = []
        for args in every:
            x, weight, bias = args["input"], args["weight"], args["bias"]
            weight = x.new_ones(x.shape[1], dtype=wide(x)) if weight is None else weight
            bias = x.new_zeros(x.shape[1], dtype=wide(x)) if bias is None else bias
            operands += x, weight, bias
        facts = self, [norm.tiles for norm in norms], [args["eps"] for args in every]
        made = _TiledBatchNorms.apply(*facts, *operands)  # type: ignore[no-untyped-call]
        for args, norm, mean, var in zip(every, norms, made[1::3], made[2::3], strict=True):
            if args["running_mean"] is not None and tracks:
                momentum, count = args["momentum"], norm.tiles.count
                unbiased = count / max(count - 1, 1)
                with torch.no_grad():
                    args["running_mean"].mul_(1 - momentum).add_(mean, alpha=momentum)
                    args["running_var"].mul_(1 - momentum).add_(var, alpha=momentum * unbiased)
        return dict(zip(self.names, made[::3], strict=True))

    def gather(self, numbers: list[Tensor], back: bool = False) -> list[Tensor]:
        """Returns numbers of each norm, (2, C), of all tiles, (tiles, 2, C)."""
        sent = torch.cat([one.reshape(-1) for one in numbers])
        gathered = self.cursor.gather(sent, self.names[0], back)
        parts = torch.split(gathered, [one.numel() for one in numbers], dim=1)
        return [part.view(-1, *one.shape) for part, one in zip(parts, numbers, strict=True)]


@IMAGE_KERNELS.register("batch_norm")
def _batch_norm(node: Node, context: Context, bind: Bind) -> Operator:
    source = node.inputs[0]
    shape = context.plan.graph.shape(source)
    boxes = held_by(context.plan.graph, context.stage, source)
    counts = [(b.n1 - b.n0) * (b.r1 - b.r0) * (b.c1 - b.c0) for b in boxes]
    if len(shape) != 4:  # shards of a vector or a sequence; tiles are of images
        counts = [count * math.prod(shape[2:]) for count in counts]
    number, op = next(
        (number, op)
        for number, op in enumerate(context.stage.comm)
        if op.kind == "norm" and node.name in (op.node, *op.readers)
    )
    new = JointNorms(context.cursor, op.readers or [node.name])
    joint: JointNorms = context.exchanges.setdefault(number, new)
    joint.norms[node.name] = _Norm(bind, NormTiles.of(node, context, counts))
    return lambda values: joint.run(node.name, values, not context.recomputing)


class _TiledBatchNorms(torch.autograd.Function):
    # For each norm x (n, C, h, w), weight and bias (C) -> normalised tile, and mean and variance
    # (C) of the whole image.
    @staticmethod
    def forward(
        ctx: Any, joint: JointNorms, tiles: list[NormTiles], eps: list[float], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        xs, weights, biases = operands[::3], operands[1::3], operands[2::3]
        local = [_statistics(one.own(x)) for one, x in zip(tiles, xs, strict=True)]
        made: list[Tensor] = []
        saved: list[Tensor] = []
        for gathered, one, x, weight, bias, small in zip(
            joint.gather(local), tiles, xs, weights, biases, eps, strict=True
        ):
            means, variances = gathered.unbind(1)  # (tiles, C) each
            shares = one.shares(means)
            # Products and sums, not a matrix product, which autocast would lower to bfloat16.
            mean = (shares * means).sum(0)
            apart = means - mean
            var = (shares * torch.addcmul(variances, apart, apart)).sum(0)
            whole = (weight, bias, False, 0.0, small)
            made += F.batch_norm(x, mean, var, *whole) if x.numel() else x.clone(), mean, var
            saved += x, weight, mean, torch.rsqrt(var + small)
        ctx.save_for_backward(*saved)
        ctx.joint, ctx.tiles = joint, tiles
        ctx.mark_non_differentiable(*made[1::3], *made[2::3])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        norms = [saved[index : index + 4] for index in range(0, len(saved), 4)]
        # Of each norm the sums over this tile of grad * xhat and of grad, (2, C): the gradients of
        # weight and bias.
        sums = [_sums(grad, *norm) for grad, norm in zip(grads[::3], norms, strict=True)]
        of_x: list[Tensor | None] = [None] * len(norms)
        if ctx.needs_input_grad[3]:
            totals = ctx.joint.gather(sums, back=True)
            of_x = [
                _gradient_of_input(one, norm, grad, total.sum(0))
                for one, norm, grad, total in zip(ctx.tiles, norms, grads[::3], totals, strict=True)
            ]
        made: list[Tensor | None] = [None, None, None]
        for grad_x, one, (_, weight, *_) in zip(of_x, sums, norms, strict=True):
            made += grad_x, one[0].to(weight.dtype), one[1].to(weight.dtype)
        return tuple(made)


def _statistics(own: Tensor) -> Tensor:
    # Mean and variance of the pixels of a tile, (2, C).
    kind = wide(own)
    if not own.numel():  # a tile without pixels has the share 0
        return own.new_zeros(2, own.shape[1], dtype=kind)
    return torch.stack(torch.batch_norm_update_stats(own, None, None, 0.0)).to(kind)


def _sums(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    if not x.numel():
        return mean.new_zeros(2, x.shape[1])
    _, *both = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return torch.stack(both).to(mean.dtype)


def _gradient_of_input(
    tiles: NormTiles, saved: tuple[Tensor, ...], grad: Tensor, total: Tensor
) -> Tensor:
    # a * (grad - mean(grad) - xhat * mean(grad * xhat)), with a = weight * invstd. ``total`` holds
    # the sums over all tiles of grad * xhat and of grad, from every pixel that a tile holds. As
    # xhat = (x - mean) * invstd, the result is linear in x, with one number per channel each:
    #
    #     a * grad + b * x + c      b = -a * invstd * mean(grad * xhat)
    #                               c = -a * mean(grad) - b * mean
    #
    # so two passes over the tile do it: batch_norm with mean 0 and variance 1 is the fused
    # b * x + c. The statistics are made of own pixels, so only these have the terms b and c.
    x, weight, mean, invstd = saved
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
