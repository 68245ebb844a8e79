r"""Computes norms of maps that several ranks hold, with one message for those that share it.

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

Norms that do not depend on each other share both messages (:mod:`hires.plan.norm_levels`): they are
one function for autograd, which comes back to it when all their gradients are there.

    x1, x2 -> statistics of both -> [gather] -> y1, y2        x1', x2' <- [gather] <- y1', y2'

A :class:`TiledNorm` defines what a mean is taken over: a channel of all samples, as in
:mod:`hires.parallel.batch_norms`, or a group of channels of one sample, as in
:mod:`hires.parallel.sample_norms`.

Source:
    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.halo import part
from hires.parallel.image_kernels import Bind, Operator, Values, tiles_of_ranks
from hires.plan.graph import Node, Rect


class NormTiles:
    """The ranks that normalise one value together.

    Args:
        counts: numbers of each mean that each tile or shard owns, in the order of ranks.
        rects: what this tile holds and what it owns, if that is less. All held pixels are
            normalised, but each counts once: with its owner.
    """

    def __init__(self, counts: list[int], rects: tuple[Rect, Rect] | None) -> None:
        self.rects = rects
        self.count = sum(counts)
        self._shares = (torch.tensor(counts, dtype=torch.float64) / self.count).view(-1, 1)
        self._constants: dict[torch.dtype, Tensor] = {}

    @classmethod
    def of(cls, node: Node, context: Context, counts: list[int]) -> NormTiles:
        """Returns them for a node of this rank; ``counts`` by tile or shard."""
        size, rects = context.plan.graph.shape(node.inputs[0])[2:], None
        if context.stage.num_tiles > 1 and context.extent(node.name) != context.own(size):
            rects = context.extent(node.name), context.own(size)
        return cls([counts[tile] for tile in tiles_of_ranks(context)], rects)

    def own(self, x: Tensor) -> Tensor:
        """Returns the pixels that count."""
        return x if self.rects is None else part(x, *self.rects)

    def shares(self, like: Tensor) -> Tensor:
        """Returns each tile's part of the image, (tiles, 1), made once for each type."""
        if like.dtype not in self._constants:
            self._constants[like.dtype] = self._shares.to(like)
        return self._constants[like.dtype]


class TiledNorm(ABC):
    """One norm of a message: what its statistics are of, and its arithmetic.

    Statistics are (2, S): mean and variance, with S = (C) or (n, groups). Sums of the way back are
    (2, K): of grad * xhat and of grad, for each channel, K = (C) or (n, C).
    """

    def __init__(self, node: Node, bind: Bind, tiles: NormTiles) -> None:
        self.node, self.bind, self.tiles = node, bind, tiles
        self.eps: float = node.args["eps"]

    @abstractmethod
    def operands(self, args: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the value, and weight and bias of each channel, (C), if there are any."""

    @abstractmethod
    def statistics(self, own: Tensor) -> Tensor:
        """Returns mean and variance of a tile's own pixels, (2, S); zeros of no pixels."""

    @abstractmethod
    def normalised(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor
    ) -> Tensor:
        """Returns the tile of the value, in the type of ``x``."""

    @abstractmethod
    def sums(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
    ) -> Tensor:
        """Returns the sums of the way back over the tile, (2, K); zeros of no pixels."""

    def sent(self, sums: Tensor, weight: Tensor | None) -> Tensor:
        """Returns what other tiles need of the sums, (2, S)."""
        return sums

    @abstractmethod
    def gradient(
        self,
        grad: Tensor,
        total: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
    ) -> Tensor:
        """Returns the gradient of the tile; ``total``: what all tiles sent, added up, (2, S)."""

    def finished(self, y: Tensor, args: dict[str, Any]) -> Tensor:
        """Returns what the node makes of its normalised tile."""
        return y


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
        """Returns numbers of each norm, (2, S), of all tiles, (tiles, 2, S)."""
        sent = torch.cat([one.reshape(-1) for one in numbers])
        gathered = self.cursor.gather(sent, self.names[0], back)
        parts = torch.split(gathered, [one.numel() for one in numbers], dim=1)
        return [part.view(-1, *one.shape) for part, one in zip(parts, numbers, strict=True)]


def operator_of(norm: TiledNorm, context: Context) -> Operator:
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
    mean, var = (one.mean(0) if one.dim() > 1 else one for one in (mean, var))
    momentum, unbiased = args["momentum"], count / max(count - 1, 1)
    args["running_mean"].mul_(1 - momentum).add_(mean, alpha=momentum)
    args["running_var"].mul_(1 - momentum).add_(var, alpha=momentum * unbiased)


class _TiledNorms(torch.autograd.Function):
    # For each norm x (n, C, h, w), weight and bias (C) or None -> normalised tile, and mean and
    # variance S of the whole image.
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
            mean, var = _combined(gathered, norm.tiles)
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
            norm.sums(grad, *one) for norm, grad, one in zip(norms, grads[::3], held, strict=True)
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
            of_channels = sums.reshape(2, -1, sums.shape[-1]).sum(1)
            made.append(grad_x)
            made += [kind and one.to(kind) for one, kind in zip(of_channels, kinds, strict=True)]
        return tuple(made)


def _combined(gathered: Tensor, tiles: NormTiles) -> tuple[Tensor, Tensor]:
    # (tiles, 2, S) -> mean and variance of the whole image.
    means, variances = gathered.unbind(1)
    shares = tiles.shares(means).view(-1, *[1] * (means.dim() - 1))
    # Products and sums, not a matrix product, which autocast would lower to bfloat16.
    mean = (shares * means).sum(0)
    apart = means - mean
    return mean, (shares * torch.addcmul(variances, apart, apart)).sum(0)
