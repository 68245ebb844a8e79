"""Computes norms of each sample in tiles: group, instance and layer norm.

A mean and variance for each group of channels of each sample, (n, groups), and so the factors of a
gradient, (n, C):

    y = a * x + shift                     a = weight * invstd, shift = bias - a * mean
    grad_x = a * grad + b * x + c         b, c: of the sums over the group's pixels on all tiles

For the message see :mod:`hires.parallel.joint_norms`.

Source:
    ATen/native/cpu/group_norm_kernel.cpp, with sums that several tiles add up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.image_kernels import IMAGE_KERNELS, Bind, Operator, wide
from hires.parallel.joint_norms import NormTiles, TiledNorm, operator_of
from hires.plan.graph import Node, Rect
from hires.plan.layout import held_by
from hires.plan.operators.operator_table import norm_groups


@IMAGE_KERNELS.register("group_norm")
@IMAGE_KERNELS.register("instance_norm")
@IMAGE_KERNELS.register("layer_norm")
def _sample_norm(node: Node, context: Context, bind: Bind) -> Operator:
    shape = context.plan.graph.shape(node.inputs[0])
    groups = norm_groups(node, shape)
    assert groups
    boxes = held_by(context.plan.graph, context.stage, node.inputs[0])
    each = shape[1] // groups
    tiles = NormTiles.of(node, context, [each * (b.r1 - b.r0) * (b.c1 - b.c0) for b in boxes])
    made = context.extent(node.name) if node.kind == "layer_norm" else None
    return operator_of(_SampleNorm(node, bind, tiles, groups, made), context)


class _SampleNorm(TiledNorm):
    # S is (n, groups), K is (n, C).
    def __init__(
        self, node: Node, bind: Bind, tiles: NormTiles, groups: int, of_pixels: Rect | None
    ) -> None:
        super().__init__(node, bind, tiles)
        self.groups = groups
        self.of_pixels = of_pixels
        """What the tile holds, if weight and bias are of pixels: those of layer norm."""

    def operands(self, args: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        of_channels = self.of_pixels is None
        affine = (args["weight"], args["bias"]) if of_channels else (None, None)
        return args["input"], *affine

    def finished(self, y: Tensor, args: dict[str, Any]) -> Tensor:
        if self.of_pixels is None:
            return y
        r0, r1, c0, c1 = self.of_pixels
        weight, bias = args["weight"], args["bias"]
        made = y if weight is None else y * weight[..., r0:r1, c0:c1]
        made = made if bias is None else made + bias[..., r0:r1, c0:c1]
        return made.to(y.dtype)

    def statistics(self, own: Tensor) -> Tensor:
        # torch's kernel for batch norms takes a fourteenth of the time of var_mean over a map that
        # lies channels-last.
        kind = wide(own)
        if not own.numel():  # a tile without pixels has the share 0
            return own.new_zeros(2, own.shape[0], self.groups, dtype=kind)
        found = [torch.batch_norm_update_stats(one, None, None, 0.0) for one in torch.split(own, 1)]
        both = (torch.stack(parts).to(kind) for parts in zip(*found, strict=True))
        means, variances = (torch.unflatten(one, 1, (self.groups, -1)) for one in both)
        mean = means.mean(2)
        return torch.stack([mean, (variances + (means - mean.unsqueeze(2)) ** 2).mean(2)])

    def normalised(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor
    ) -> Tensor:
        invstd = torch.rsqrt(var + self.eps)
        scale, shift = self._of_channels(x, invstd), self._of_channels(x, -mean * invstd)
        if weight is not None:
            scale, shift = scale * weight, shift * weight
        if bias is not None:
            shift = shift + bias
        return torch.addcmul(_on_map(shift), x, _on_map(scale)).to(x.dtype)

    def sums(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
    ) -> Tensor:
        mean, invstd = self._of_channels(x, mean), self._of_channels(x, invstd)
        if not x.numel():
            return mean.new_zeros(2, *mean.shape)
        backward, mask = torch.ops.aten.native_batch_norm_backward, [False, True, True]
        samples = zip(torch.split(grad, 1), torch.split(x, 1), mean, invstd, strict=True)
        sums = [
            backward(of_y, one, None, None, None, *statistics, True, 0.0, mask)[1:]
            for of_y, one, *statistics in samples
        ]
        return torch.stack([torch.stack(one) for one in zip(*sums, strict=True)]).to(mean.dtype)

    def sent(self, sums: Tensor, weight: Tensor | None) -> Tensor:
        weighed = sums if weight is None else sums * weight
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
        pulled = total * (invstd / -self.tiles.count)
        b = pulled[0] * invstd
        c = torch.addcmul(pulled[1], b, mean, value=-1)
        a = self._of_channels(x, invstd)
        result = grad * _on_map(a if weight is None else a * weight)
        # Only own pixels have made the statistics.
        own, level, slope = self.tiles.own(result), self._of_channels(x, c), self._of_channels(x, b)
        own.add_(torch.addcmul(_on_map(level), self.tiles.own(x), _on_map(slope)))
        return result.to(x.dtype)

    def _of_channels(self, x: Tensor, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(x.shape[1] // self.groups, 1)


def _on_map(of_channels: Tensor) -> Tensor:
    return of_channels[..., None, None]
