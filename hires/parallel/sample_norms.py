"""Computes norms of each sample in tiles: group, instance and layer norm.

As batch norm in :mod:`hires.parallel.image_kernels`, but with a mean and variance for each group of
channels of each sample, (n, groups), and so with the factors of a gradient, (n, C):

    y = a * x + shift                     a = weight * invstd, shift = bias - a * mean
    grad_x = a * grad + b * x + c         b, c: of the sums over the group's pixels on all tiles

Source:
    ATen/native/cpu/group_norm_kernel.cpp, with sums that several tiles add up.
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
        weight, bias = args["weight"], args["bias"]
        of_pixels = node.kind == "layer_norm"
        affine = (None, None) if of_pixels else (weight, bias)
        apply, facts = _TiledGroupNorm.apply, (tiles, groups, args["eps"])
        y, mean, var = apply(args["input"], *affine, *facts)  # type: ignore[no-untyped-call]
        if of_pixels:
            y = y if weight is None else y * _of_tile(weight, made)
            y = y if bias is None else y + _of_tile(bias, made)
        if args.get("running_mean") is not None and not context.recomputing:
            _update(args, mean, var, tiles.count)
        return y.to(args["input"].dtype)  # type: ignore[no-any-return]

    return run


def _of_tile(weight: Tensor, rect: tuple[int, int, int, int]) -> Tensor:
    return weight[..., rect[0] : rect[1], rect[2] : rect[3]]


@torch.no_grad()
def _update(args: dict[str, Any], mean: Tensor, var: Tensor, count: int) -> None:
    # Each sample would move the running statistics of its own copy; the copies' mean is kept.
    momentum, unbiased = args["momentum"], count / max(count - 1, 1)
    args["running_mean"].mul_(1 - momentum).add_(mean.mean(0), alpha=momentum)
    args["running_var"].mul_(1 - momentum).add_(var.mean(0), alpha=momentum * unbiased)


class _TiledGroupNorm(torch.autograd.Function):
    # (n, C, h, w) -> normalised tile, and mean and variance (n, groups) of the whole image.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        tiles: NormTiles,
        groups: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        local = _moments(tiles.own(x), groups)
        means, variances = tiles.cursor.gather(local, tiles.node).unbind(1)  # (tiles, n, groups)
        shares = tiles.shares(means).unsqueeze(-1)
        mean = (shares * means).sum(0)
        apart = means - mean
        var = (shares * torch.addcmul(variances, apart, apart)).sum(0)
        invstd = torch.rsqrt(var + eps)
        each = x.shape[1] // groups
        scale, shift = _of_channels(invstd, each), _of_channels(-mean * invstd, each)
        if weight is not None:
            scale, shift = scale * weight, shift * weight
        if bias is not None:
            shift = shift + bias
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.tiles, ctx.biased = tiles, bias is not None
        ctx.mark_non_differentiable(mean, var)
        y = torch.addcmul(_on_map(shift), x, _on_map(scale))
        return y.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _mean: Tensor, _var: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        tiles: NormTiles = ctx.tiles
        each = x.shape[1] // mean.shape[1]
        sums = _sums(grad, x, _of_channels(mean, each), _of_channels(invstd, each))  # (2, n, C)
        of_weight = None if weight is None else sums[0].sum(0).to(weight.dtype)
        of_bias = sums[1].sum(0).to(x.dtype) if ctx.biased else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            weighed = sums if weight is None else sums * weight
            grouped = torch.unflatten(weighed, 2, (-1, each)).sum(3)
            total = tiles.cursor.gather(grouped, tiles.node, back=True).sum(0)  # (2, n, groups)
            pulled = total * (invstd / -tiles.count)
            b = pulled[0] * invstd
            c = torch.addcmul(pulled[1], b, mean, value=-1)
            a = _of_channels(invstd, each)
            grad_x = grad * _on_map(a if weight is None else a * weight)
            # Only own pixels have made the statistics.
            own, level, slope = tiles.own(grad_x), _of_channels(c, each), _of_channels(b, each)
            own.add_(torch.addcmul(_on_map(level), tiles.own(x), _on_map(slope)))
            grad_x = grad_x.to(x.dtype)
        return grad_x, of_weight, of_bias, None, None, None


def _moments(own: Tensor, groups: int) -> Tensor:
    # Mean and variance of each group of channels, (2, n, groups). torch's kernel for batch norms
    # takes a fourteenth of the time of var_mean over a map that lies channels-last.
    kind = wide(own)
    if not own.numel():  # a tile without pixels has the share 0
        return own.new_zeros(2, own.shape[0], groups, dtype=kind)
    found = [torch.batch_norm_update_stats(one, None, None, 0.0) for one in torch.split(own, 1)]
    means, variances = (torch.stack(parts).to(kind) for parts in zip(*found, strict=True))
    means, variances = (torch.unflatten(one, 1, (groups, -1)) for one in (means, variances))
    mean = means.mean(2)
    return torch.stack([mean, (variances + (means - mean.unsqueeze(2)) ** 2).mean(2)])


def _sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    # Sums of grad * xhat and of grad over the tile, (2, n, C).
    if not x.numel():
        return mean.new_zeros(2, *mean.shape)
    backward, mask = torch.ops.aten.native_batch_norm_backward, [False, True, True]
    samples = zip(torch.split(grad, 1), torch.split(x, 1), mean, invstd, strict=True)
    sums = [
        backward(of_y, one, None, None, None, *statistics, True, 0.0, mask)[1:]
        for of_y, one, *statistics in samples
    ]
    return torch.stack([torch.stack(parts) for parts in zip(*sums, strict=True)]).to(mean.dtype)


def _of_channels(of_groups: Tensor, each: int) -> Tensor:
    return of_groups.repeat_interleave(each, 1)


def _on_map(of_channels: Tensor) -> Tensor:
    return of_channels[..., None, None]
