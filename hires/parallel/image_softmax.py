r"""Computes softmax along rows, columns or all pixels of the image, each tile for its own.

    tile 0   log of its sum of exp(x) \\
                                       > gather, (tiles, ...) -> log of the whole sum, lse
    tile 1   log of its sum of exp(x) /

    y = exp(x - lse)        grad_x = y * (grad - sum of grad * y over all tiles)

so one message of a number for each softmax goes forward and one back.

Source:
    Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.image_kernels import (
    Bind,
    Operator,
    Values,
    wide,
)
from hires.parallel.reductions import KeptDim
from hires.plan.factors import ROWS
from hires.plan.graph import Node
from hires.plan.rules import dims_of, reduced_dims


class _Along:
    # The tiles that share one softmax.
    def __init__(self, node: Node, context: Context) -> None:
        graph, stage, [source] = context.plan.graph, context.stage, node.inputs
        self.node, self.cursor, self.log = node.name, context.cursor, node.kind == "log_softmax"
        [self.dim] = reduced_dims(node, graph.shape(source))
        self.kept = KeptDim.of(node, context, context.tile_order)
        if self.kept is not None:  # what this tile holds of that dim
            axis = dims_of(graph, stage, source)[self.kept.place][0].axis
            own = context.own_of(source)
            self.first, self.end = own[:2] if axis == ROWS else own[2:]

    def over_tiles(self, own: Tensor, back: bool) -> Tensor:
        # From the numbers of each tile: log of a sum of exponentials, or ``back`` a sum.
        sent = own if self.kept is None else self.kept.filled_up(own)
        gathered = self.cursor.gather(sent.contiguous(), self.node, back)

        def combine(parts: Tensor) -> Tensor:
            return parts.sum(0) if back else parts.logsumexp(0)

        if self.kept is None:
            return combine(gathered)
        place = self.kept.place
        whole = torch.cat([combine(part) for _, part in self.kept.split(gathered)], place)
        return whole.narrow(place, self.first, self.end - self.first)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, along: _Along) -> Tensor:
        high = x.to(wide(x))
        if x.shape[along.dim]:
            local = high.logsumexp(along.dim, keepdim=True)
        else:  # a tile without pixels adds nothing
            local = high.new_full([*x.shape[: along.dim], 1, *x.shape[along.dim + 1 :]], -math.inf)
        y = high - along.over_tiles(local, back=False)
        y = (y if along.log else y.exp()).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.along = along
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        [y], along = ctx.saved_tensors, ctx.along
        y, high = y.to(wide(y)), grad.to(wide(grad))
        direct = high if along.log else high * y
        total = along.over_tiles(direct.sum(along.dim, keepdim=True), back=True)
        shares = y.exp() if along.log else y
        return torch.addcmul(direct, shares, total, value=-1).to(grad.dtype), None


def softmax(node: Node, context: Context, bind: Bind) -> Operator:
    """Returns the callable of a softmax, or its logarithm, along dims that tiles cut."""
    along = _Along(node, context)
    source = node.inputs[0]

    def run(values: Values) -> Tensor:
        x = values[source]
        return _Softmax.apply(x, along)  # type: ignore[no-any-return,no-untyped-call]

    return run
