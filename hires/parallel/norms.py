r"""Computes norms of maps that several ranks hold: batch, group, instance and layer norm.

A norm has the statistics of the whole image. Every tile computes mean and variance of its own
pixels; the tiles exchange them in one message and combine them with the parallel variance formula,
which does not cancel as sums of squares do:

    tile 0   mean 0, var 0 \            mean = sum of share t * mean t
                            > gather
    tile 1   mean 1, var 1 /            var  = sum of share t * (var t + (mean t - mean)^2)

The statistics depend on every pixel, so the gradient of a pixel has a term of the whole image:

    grad_x = a * (grad - mean(grad) - xhat * mean(grad * xhat)),  a = weight / sqrt(var + eps)

Both means are over all tiles: one more message, on the way back. Weight and bias need none here:
their sums over the tile are parts of the gradient, which are summed at the end of the step.

Norms that do not depend on each other share both messages (:mod:`hires.plan.layout`): they are
one function for autograd, which comes back to it when all their gradients are there.

    x1, x2 -> statistics of both -> [gather] -> y1, y2        x1', x2' <- [gather] <- y1', y2'

A mean is taken over a group of channels of a set of samples: batch norm has one set, of all samples
of a microbatch, and a group for each channel; group, instance and layer norm have a set for each
sample.

Source:
    ATen/native/cpu/group_norm_kernel.cpp, with sums that several tiles add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.halo import part
from hires.parallel.image_kernels import (
    Bind,
    Operator,
    Values,
    combine_moments,
    wide,
)
from hires.plan.graph import Node, Rect
from hires.plan.operators.operator_table import norm_groups


class NormTiles:
    """The ranks that normalise one value together.

    Args:
        counts: numbers of each mean that each tile or shard owns, in the order of ranks.
        rects: what this tile holds and what it owns, if that is less. All held pixels are
            normalised, but each counts once: with its owner.
    """

    def __init__(
        self, counts: list[int], rects: tuple[Rect, Rect] | None, device: torch.device
    ) -> None:
        self.rects, self.count = rects, sum(counts)
        self.shares = torch.tensor(counts, dtype=torch.float64, device=device) / self.count
        """Each tile's part of the image, (tiles,)."""

    @classmethod
    def of(cls, node: Node, context: Context, counts: list[int]) -> NormTiles:
        """Returns them for a node of this rank; ``counts`` by tile or shard."""
        size, rects = context.plan.graph.shape(node.inputs[0])[2:], None
        if context.stage.num_tiles > 1 and context.extent(node.name) != context.own(size):
            rects = context.extent(node.name), context.own(size)
        return cls([counts[tile] for tile in context.tile_order], rects, context.device)

    def own(self, x: Tensor) -> Tensor:
        """Returns the pixels that count."""
        return x if self.rects is None else part(x, *self.rects)


def batch_norm(node: Node, context: Context, bind: Bind) -> Operator:
    """Returns the callable of a batch norm by the statistics of the microbatch."""
    source = node.inputs[0]
    shape = context.plan.graph.shape(source)
    boxes = context.boxes(source)
    tiles = NormTiles.of(node, context, [math.prod(b.shape([0, 1, *shape[2:]])) for b in boxes])
    return _operator_of(TiledNorm(node, bind, tiles, shape[1]), context)


def sample_norm(node: Node, context: Context, bind: Bind) -> Operator:
    """Returns the callable of a norm by the statistics of each sample."""
    shape = context.plan.graph.shape(node.inputs[0])
    groups = norm_groups(node, shape)
    assert groups
    boxes = context.boxes(node.inputs[0])
    each = shape[1] // groups
    counts = [each * math.prod(box.shape([0, 1])[1:]) for box in boxes]
    tiles = NormTiles.of(node, context, counts)
    pixels = context.extent(node.name) if node.kind == "layer_norm" else None
    return _operator_of(TiledNorm(node, bind, tiles, groups, True, pixels), context)


class TiledNorm:
    """One norm of a message.

    Statistics are (2, sets, groups): mean and variance. Sums of the way back are (2, sets, C): of
    grad * xhat and of grad, for each channel. ``each_sample``: every sample is a set of its own.
    ``pixels``: what the tile holds, if weight and bias are of pixels: those of layer norm.
    """

    def __init__(
        self,
        node: Node,
        bind: Bind,
        tiles: NormTiles,
        groups: int,
        each_sample: bool = False,
        pixels: Rect | None = None,
    ) -> None:
        self.node, self.bind, self.tiles = node, bind, tiles
        self.groups, self.each_sample, self.pixels = groups, each_sample, pixels
        self.eps: float = node.args["eps"]

    def operands(self, args: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the value, and weight and bias of each channel, (C), if there are any."""
        affine = (args["weight"], args["bias"]) if self.pixels is None else (None, None)
        return args["input"], *affine

    def finished(self, y: Tensor, args: dict[str, Any]) -> Tensor:
        """Returns the value of the node from its normalised tile."""
        if self.pixels is None:
            return y
        r0, r1, c0, c1 = self.pixels
        weight, bias = args["weight"], args["bias"]
        scaled = y if weight is None else y * weight[..., r0:r1, c0:c1]
        scaled = scaled if bias is None else scaled + bias[..., r0:r1, c0:c1]
        return scaled.to(y.dtype)

    def statistics(self, own: Tensor) -> Tensor:
        """Returns mean and variance of a tile's own pixels; zeros of no pixels."""
        # torch's kernel for batch norms takes a fourteenth of the time of var_mean over a map that
        # lies channels-last.
        kind = wide(own)
        if not own.numel():  # a tile without pixels has the share 0
            num_sets = own.shape[0] if self.each_sample else 1
            return own.new_zeros(2, num_sets, self.groups, dtype=kind)
        found = [torch.batch_norm_update_stats(one, None, None, 0.0) for one in self._sets(own)]
        both = torch.stack([torch.stack(parts) for parts in zip(*found, strict=True)]).to(kind)
        if self.groups == own.shape[1]:
            return both
        channels = torch.unflatten(both, 2, (self.groups, -1)).movedim(3, 0)
        equal = channels.new_full((len(channels),), 1 / len(channels))
        return torch.stack(combine_moments(channels, equal))

    def normalised(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor
    ) -> Tensor:
        """Returns the tile of the value, in the type of ``x``."""
        if not x.numel():
            return x.clone()
        invstd = torch.rsqrt(var + self.eps)
        scale, shift = self._of_channels(x, invstd), self._of_channels(x, -mean * invstd)
        if weight is not None:
            scale, shift = scale * weight, shift * weight
        if bias is not None:
            shift = shift + bias
        return _scaled(x, scale, shift).to(x.dtype)

    def sums(self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
        """Returns the sums of the way back over the tile, (2, sets, C); zeros of no pixels."""
        mean, invstd = self._of_channels(x, mean), self._of_channels(x, invstd)
        if not x.numel():
            return mean.new_zeros(2, *mean.shape)
        backward, mask = torch.ops.aten.native_batch_norm_backward, [False, True, True]
        sets = zip(self._sets(grad), self._sets(x), mean, invstd, strict=True)
        sums = [
            backward(of_y, one, None, None, None, *statistics, True, 0.0, mask)[1:]
            for of_y, one, *statistics in sets
        ]
        return torch.stack([torch.stack(one) for one in zip(*sums, strict=True)]).to(mean.dtype)

    def sent(self, sums: Tensor, weight: Tensor | None) -> Tensor:
        """Returns what other tiles need of the sums, (2, sets, groups)."""
        weighed = sums if weight is None else sums * weight
        if self.groups == sums.shape[2]:
            return weighed
        return torch.unflatten(weighed, 2, (self.groups, -1)).sum(3)

    def gradient(
        self,
        grad: Tensor,
        total: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
    ) -> Tensor:
        """Returns the gradient of the tile; ``total``: what all tiles sent, added up."""
        # a * (grad - mean(grad) - xhat * mean(grad * xhat)), with a = weight * invstd. ``total``
        # holds the sums of every pixel that a tile holds. As xhat = (x - mean) * invstd, the result
        # is linear in x, with one number per set and channel each:
        #
        #     a * grad + b * x + c      b = -a * invstd * mean(grad * xhat)
        #                               c = -a * mean(grad) - b * mean
        #
        # The statistics are made of own pixels, so only these have the terms b and c.
        if not x.numel():
            return torch.zeros_like(x)
        of_mean = total * (invstd / -self.tiles.count)
        b = of_mean[0] * invstd
        c = torch.addcmul(of_mean[1], b, mean, value=-1)
        pull = _scaled(self.tiles.own(x), self._of_channels(x, b), self._of_channels(x, c))
        a = self._of_channels(x, invstd)
        scale = _on_map(a if weight is None else a * weight, x).to(pull.dtype)
        if self.tiles.rects is None:
            return pull.addcmul_(grad, scale).to(x.dtype)
        result = grad * scale
        self.tiles.own(result).add_(pull)
        return result.to(x.dtype)

    def _sets(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, 1) if self.each_sample else (x,)

    def _of_channels(self, x: Tensor, of_groups: Tensor) -> Tensor:
        repeats = x.shape[1] // self.groups
        return of_groups if repeats == 1 else of_groups.repeat_interleave(repeats, 1)


def _scaled(x: Tensor, slope: Tensor, level: Tensor) -> Tensor:
    # slope * x + level, for each set and channel, (sets, C), in one pass. Of one set torch's kernel
    # takes any type; of several the result has that of the factors.
    if len(slope) > 1:
        return torch.addcmul(_on_map(level, x), x, _on_map(slope, x))
    [slope], [level] = slope, level
    mean, var = torch.zeros_like(slope), torch.ones_like(slope)
    return F.batch_norm(x, mean, var, slope, level, False, 0.0, 0.0)


def _on_map(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels[(..., *[None] * (x.dim() - 2))]


@dataclass
class JointNorms:
    """The norms of one message; the first one that runs computes all of them."""

    cursor: Cursor
    names: list[str]
    norms: dict[str, TiledNorm] = field(default_factory=dict)
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
        operands = [
            operand
            for norm, args in zip(norms, every, strict=True)
            for operand in norm.operands(args)
        ]
        made = _TiledNorms.apply(self, norms, *operands)  # type: ignore[no-untyped-call]
        for args, norm, mean, var in zip(every, norms, made[1::3], made[2::3], strict=True):
            if args.get("running_mean") is not None and tracks:
                _move_running_statistics(args, mean, var, norm.tiles.count)
        return {
            norm.node.name: norm.finished(y, args)
            for norm, y, args in zip(norms, made[::3], every, strict=True)
        }

    def gather(self, numbers: list[Tensor], back: bool = False) -> list[Tensor]:
        """Returns numbers of each norm, (2, ...), of all tiles, (tiles, 2, ...)."""
        sent = torch.cat([one.reshape(-1) for one in numbers])
        gathered = self.cursor.gather(sent, self.names[0], back)
        parts = torch.split(gathered, [one.numel() for one in numbers], dim=1)
        return [part.view(-1, *one.shape) for part, one in zip(parts, numbers, strict=True)]


def _operator_of(norm: TiledNorm, context: Context) -> Operator:
    """Returns the callable of a norm, which computes those of its message with it."""
    name = norm.node.name
    number, op = next(
        (number, op)
        for number, op in enumerate(context.stage.comm)
        if op.kind == "norm" and name in (op.node, *op.readers)
    )
    new = JointNorms(context.cursor, op.readers or [name])
    joint: JointNorms = context.exchanges.setdefault(number, new)
    joint.norms[name] = norm
    return lambda values: joint.run(name, values, not context.recomputing)


@torch.no_grad()
def _move_running_statistics(args: dict[str, Any], mean: Tensor, var: Tensor, count: int) -> None:
    # Each sample would move the running statistics of its own copy; the copies' mean is kept.
    mean, var = mean.mean(0), var.mean(0)
    momentum, unbiased = args["momentum"], count / max(count - 1, 1)
    args["running_mean"].mul_(1 - momentum).add_(mean, alpha=momentum)
    args["running_var"].mul_(1 - momentum).add_(var, alpha=momentum * unbiased)


class _TiledNorms(torch.autograd.Function):
    # For each norm x (n, C, h, w), weight and bias (C) or None -> normalised tile, and mean and
    # variance (sets, groups) of the whole image.
    @staticmethod
    def forward(
        ctx: Any, joint: JointNorms, norms: list[TiledNorm], *operands: Any
    ) -> tuple[Tensor, ...]:
        xs, weights, biases = operands[::3], operands[1::3], operands[2::3]
        local = [norm.statistics(norm.tiles.own(x)) for norm, x in zip(norms, xs, strict=True)]
        made: list[Tensor] = []
        saved: list[Tensor | None] = []
        for gathered, norm, x, weight, bias in zip(
            joint.gather(local), norms, xs, weights, biases, strict=True
        ):
            mean, var = combine_moments(gathered, norm.tiles.shares)
            made += norm.normalised(x, weight, bias, mean, var), mean, var
            saved += x, weight, mean, torch.rsqrt(var + norm.eps)
        ctx.save_for_backward(*saved)
        ctx.joint, ctx.norms = joint, norms
        ctx.kinds = [None if one is None else one.dtype for one in operands]
        ctx.mark_non_differentiable(*made[1::3], *made[2::3])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        norms: list[TiledNorm] = ctx.norms
        held = [saved[index : index + 4] for index in range(0, len(saved), 4)]
        # Their sums over the samples are the gradients of weight and bias.
        every = [
            norm.sums(grad, x, mean, invstd)
            for norm, grad, (x, _, mean, invstd) in zip(norms, grads[::3], held, strict=True)
        ]
        of_x: list[Tensor | None] = [None] * len(norms)
        if ctx.needs_input_grad[2]:
            sent = [
                norm.sent(sums, weight)
                for norm, sums, (_, weight, *_) in zip(norms, every, held, strict=True)
            ]
            totals = ctx.joint.gather(sent, back=True)
            of_x = [
                norm.gradient(grad, total.sum(0), *one)
                for norm, one, grad, total in zip(norms, held, grads[::3], totals, strict=True)
            ]
        made: list[Tensor | None] = [None, None]
        for index, (grad_x, sums) in enumerate(zip(of_x, every, strict=True)):
            kinds = ctx.kinds[3 * index + 1 : 3 * index + 3]
            of_channels = sums.sum(1)
            made.append(grad_x)
            made += [kind and one.to(kind) for one, kind in zip(of_channels, kinds, strict=True)]
        return tuple(made)
