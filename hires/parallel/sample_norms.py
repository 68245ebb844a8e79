"""Computes norms of each sample in tiles: group, instance and layer norm.

Statistics are those of :mod:`hires.parallel.image_kernels`' batch norm, but of groups of channels
of each sample, (n, groups). The rest is a product and a sum for each number of the tile, as ATen's
native/cpu/group_norm_kernel.cpp has it:

    y = a * x + b,   a = weight / sqrt(var + eps),   b = bias - a * mean

so autograd finds the gradients of mean and variance as sums over the tile, which the tiles add up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.image_kernels import (
    IMAGE_KERNELS,
    Bind,
    NormTiles,
    Operator,
    Values,
    wide,
)
from hires.plan.graph import Node
from hires.plan.layout import held_by
from hires.plan.operators.operator_table import norm_groups


@IMAGE_KERNELS.register("group_norm")
@IMAGE_KERNELS.register("instance_norm")
@IMAGE_KERNELS.register("layer_norm")
def _sample_norm(node: Node, context: Context, bind: Bind) -> Operator:
    shape = context.plan.graph.shape(node.inputs[0])
    groups, channels = norm_groups(node, shape), shape[1]
    assert groups
    boxes = held_by(context.plan.graph, context.stage, node.inputs[0])
    each = channels // groups
    tiles = NormTiles.of(node, context, [each * (b.r1 - b.r0) * (b.c1 - b.c0) for b in boxes])
    made = context.extent(node.name)

    def run(values: Values) -> Tensor:
        args = bind(values)
        x: Tensor = args["input"]
        mean, var = _GroupStatistics.apply(tiles.own(x), tiles, groups)  # type: ignore[no-untyped-call]
        scale = torch.rsqrt(var + args["eps"])
        shift = -mean * scale
        weight, bias = args["weight"], args["bias"]
        scale, shift = (one.repeat_interleave(each, 1)[..., None, None] for one in (scale, shift))
        if node.kind == "layer_norm":  # weights of every pixel
            y = torch.addcmul(shift, x, scale)
            y = y if weight is None else y * _of_tile(weight, made)
            y = y if bias is None else y + _of_tile(bias, made)
            return y.to(x.dtype)
        if weight is not None:
            scale, shift = scale * weight.view(-1, 1, 1), shift * weight.view(-1, 1, 1)
        if bias is not None:
            shift = shift + bias.view(-1, 1, 1)
        if args.get("running_mean") is not None and not context.recomputing:
            _update(args, mean.detach(), var.detach(), tiles.count)
        return torch.addcmul(shift, x, scale).to(x.dtype)

    return run


def _of_tile(weight: Tensor, rect: tuple[int, int, int, int]) -> Tensor:
    return weight[..., rect[0] : rect[1], rect[2] : rect[3]]


@torch.no_grad()
def _update(args: dict[str, Any], mean: Tensor, var: Tensor, count: int) -> None:
    # Each sample would move the running statistics of its own copy; the copies' mean is kept.
    momentum, unbiased = args["momentum"], count / max(count - 1, 1)
    args["running_mean"].mul_(1 - momentum).add_(mean.mean(0), alpha=momentum)
    args["running_var"].mul_(1 - momentum).add_(var.mean(0), alpha=momentum * unbiased)


class _GroupStatistics(torch.autograd.Function):
    # Own pixels (n, C, h, w) -> mean and variance of each group of channels, (n, groups), over all
    # tiles. Every tile normalises its pixels by them, so their gradient is a part on each: the
    # parts are summed, and pixel x gets  (grad of mean + 2 * (x - mean) * grad of var) / count.
    @staticmethod
    def forward(ctx: Any, x: Tensor, tiles: NormTiles, groups: int) -> tuple[Tensor, Tensor]:
        grouped, kind = torch.unflatten(x, 1, (groups, -1)), wide(x)
        if x.numel():
            local = torch.stack(torch.var_mean(grouped.to(kind), (2, 3, 4), correction=0))
        else:  # a tile without pixels has the share 0
            local = x.new_zeros(2, x.shape[0], groups, dtype=kind)
        variances, means = tiles.cursor.gather(local, tiles.node).unbind(1)  # (tiles, n, groups)
        shares = tiles.shares(means).unsqueeze(-1)
        mean = (shares * means).sum(0)
        apart = means - mean
        var = (shares * torch.addcmul(variances, apart, apart)).sum(0)
        ctx.save_for_backward(x, mean)
        ctx.tiles = tiles
        return mean, var

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_var: Tensor) -> tuple[Tensor, None, None]:
        (x, mean), tiles = ctx.saved_tensors, ctx.tiles
        parts = torch.stack([of_mean, of_var])
        total = tiles.cursor.gather(parts, tiles.node, back=True).sum(0) / tiles.count
        slope = (2 * total[1])[:, :, None, None, None]
        level = total[0][:, :, None, None, None] - slope * mean[:, :, None, None, None]
        grouped = torch.unflatten(x, 1, (mean.shape[1], -1))
        return torch.addcmul(level, grouped, slope).flatten(1, 2).to(x.dtype), None, None
