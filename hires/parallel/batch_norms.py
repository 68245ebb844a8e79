"""Computes batch norm, whose statistics are of all samples of a microbatch, for each channel.

For the message see :mod:`hires.parallel.joint_norms`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.image_kernels import IMAGE_KERNELS, Bind, Operator, wide
from hires.parallel.joint_norms import NormTiles, TiledNorm, operator_of
from hires.plan.graph import Node
from hires.plan.layout import held_by


@IMAGE_KERNELS.register("batch_norm")
def _batch_norm(node: Node, context: Context, bind: Bind) -> Operator:
    source = node.inputs[0]
    shape = context.plan.graph.shape(source)
    boxes = held_by(context.plan.graph, context.stage, source)
    counts = [(b.n1 - b.n0) * (b.r1 - b.r0) * (b.c1 - b.c0) for b in boxes]
    if len(shape) != 4:  # shards of a vector or a sequence; tiles are of images
        counts = [count * math.prod(shape[2:]) for count in counts]
    return operator_of(_BatchNorm(node, bind, NormTiles.of(node, context, counts)), context)


class _BatchNorm(TiledNorm):
    # S and K are (C).
    def operands(self, args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias = args["input"], args["weight"], args["bias"]
        weight = x.new_ones(x.shape[1], dtype=wide(x)) if weight is None else weight
        bias = x.new_zeros(x.shape[1], dtype=wide(x)) if bias is None else bias
        return x, weight, bias

    def statistics(self, own: Tensor) -> Tensor:
        kind = wide(own)
        if not own.numel():  # a tile without pixels has the share 0
            return own.new_zeros(2, own.shape[1], dtype=kind)
        return torch.stack(torch.batch_norm_update_stats(own, None, None, 0.0)).to(kind)

    def normalised(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor
    ) -> Tensor:
        if not x.numel():
            return x.clone()
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, self.eps)

    def sums(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
    ) -> Tensor:
        if not x.numel():
            return mean.new_zeros(2, x.shape[1])
        _, *both = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, None, None, mean, invstd, True, 0.0, [False, True, True]
        )
        return torch.stack(both).to(mean.dtype)

    def gradient(
        self,
        grad: Tensor,
        total: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
    ) -> Tensor:
        # a * (grad - mean(grad) - xhat * mean(grad * xhat)), with a = weight * invstd. ``total``
        # holds the sums of every pixel that a tile holds. As xhat = (x - mean) * invstd, the result
        # is linear in x, with one number per channel each:
        #
        #     a * grad + b * x + c      b = -a * invstd * mean(grad * xhat)
        #                               c = -a * mean(grad) - b * mean
        #
        # so two passes over the tile do it: batch_norm with mean 0 and variance 1 is the fused
        # b * x + c. The statistics are made of own pixels, so only these have the terms b and c.
        if not x.numel():
            return torch.zeros_like(x)
        assert weight is not None
        tiles, a = self.tiles, weight * invstd
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
