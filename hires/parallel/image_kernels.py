"""Holds what operators over the image share: their registry, the tiles of a norm, shared values.

Batch norm is in :mod:`hires.parallel.batch_norms`, norms of each sample in
:mod:`hires.parallel.sample_norms`, sums and maxima of the image in
:mod:`hires.parallel.reductions`. All are registered here under their ATen names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.halo import part
from hires.plan.graph import Node, Rect

Values = dict[str, Any]  # the values of a pass by the names of their nodes
Operator = Callable[[Values], Any]  # computes the value of a node
Bind = Callable[[Values], dict[str, Any]]  # collects the arguments of a node by name

IMAGE_KERNELS: Registry[Callable[[Node, Context, Bind], Operator]] = Registry("image kernel")
"""ATen name -> makes the callable of a node whose rule is ``norm`` or ``reduce``."""


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
