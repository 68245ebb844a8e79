r"""Computes sums, maxima, variances ... of the image from a few numbers of each tile.

    tile 0   its pixels -> numbers \
                                     > gather, (tiles, ...) -> the same value on every tile
    tile 1   its pixels -> numbers /

What follows is computed alike on all tiles, so each has the complete gradient of the value: it
goes back through the combination to the tile's own numbers and its own pixels, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.context import Context
from hires.parallel.halo import part
from hires.parallel.image_kernels import (
    Bind,
    Operator,
    Values,
    combine_moments,
    wide,
)
from hires.plan.factors import COLUMNS, ROWS, Factor, local_size, map_shape, shape_of
from hires.plan.graph import Node, Rect
from hires.plan.rules import dims_of, kept_dim, most_of, reduced_dims
from hires.plan.tiling import area, split_all


class Reduced(NamedTuple):
    """What one node reduces."""

    args: dict[str, Any]
    dims: list[int]
    """Of the value, a map (n, C, H, W) or of any other dims."""
    keep: bool
    rect: Rect
    """What this tile owns of the map."""
    along: list[Factor]
    """What the dim consists of along which it looks for an extreme."""
    shares: Tensor
    """Each tile's part of all numbers, in the order of ranks, (tiles,)."""
    numbers: int
    """Numbers of the map that make one number of the result."""

    def filled(self, x: Tensor, number: float) -> Tensor:
        """Returns what a tile without pixels sends; it stays tied to them for the way back."""
        shape = [1 if dim in self.dims else size for dim, size in enumerate(x.shape)]
        kept = x.new_full(shape, number) + 0 * x.sum(self.dims, keepdim=True)
        return kept if self.keep else kept.squeeze(self.dims)


class Reduction(NamedTuple):
    """How tiles compute an operator over the image."""

    local: Callable[[Tensor, Reduced], Tensor]
    """Own pixels -> what the tile sends, (...) or (numbers, ...)."""
    combine: Callable[[Tensor, Reduced], Any]
    """What all tiles sent, (tiles, ...) -> the value."""


REDUCTIONS: Registry[Reduction] = Registry("reduction")
"""ATen name -> its reduction."""


def declare(names: str, local: Any, combine: Any) -> None:
    """Registers the reduction of some operators."""
    for name in names.split():
        REDUCTIONS.register(name)(Reduction(local, combine))


def reduction(node: Node, context: Context, bind: Bind) -> Operator:
    """Returns the callable of an operator of :data:`REDUCTIONS`."""
    how, [source] = REDUCTIONS[node.kind], node.inputs
    graph, stage = context.plan.graph, context.stage
    shape, factors = graph.shape(source), dims_of(graph, stage, source)
    *_, rows, cols = map_shape(factors)
    held, own = context.extent(source), context.own([rows, cols])
    dims = sorted(reduced_dims(node, shape))
    order = context.tile_order
    rects = [box.rect or (0, rows, 0, cols) for box in context.boxes(source)]
    areas = [area(rects[tile]) / (rows * cols) for tile in order]
    shares = torch.tensor(areas, dtype=torch.float64, device=context.device)
    count = math.prod(shape[dim] for dim in dims)
    keep = bool(node.args.get("keepdim", "output_size" in node.args))
    pixels = [Factor(rows, ROWS), Factor(cols, COLUMNS)]
    along = [*factors[dims[0]]] if "dim" in node.args else pixels
    place, kept = order.index(context.tile), KeptDim.of(node, context, order)

    def run(values: Values) -> Any:
        x = part(values[source], held, own)
        x = x.to(wide(x)) if x.is_floating_point() else x
        facts = Reduced(bind(values), dims, keep, own, along, shares, count)
        sent = how.local(x, facts)
        sent = sent if kept is None else kept.filled_up(sent)
        gathered = _GatherTiles.apply(sent, context.cursor, node.name, place)  # type: ignore[no-untyped-call]
        whole = how.combine
        value = kept.combined(gathered, facts, whole) if kept else whole(gathered, facts)
        kind = values[source].dtype
        made = value if isinstance(value, tuple) else (value,)
        made = tuple(one.to(kind) if one.is_floating_point() else one for one in made)
        return made if node.shape is None else made[0]  # only the first is read

    return run


class KeptDim(NamedTuple):
    """The dim that tiles cut and a reduction leaves, where grids have rows and columns.

    Tiles of one part of it are combined apart:

        tile 0  rows 0-2 | tile 1  rows 0-2        mean over columns   0-2 of tiles 0 and 1
        tile 2  rows 3-4 | tile 3  rows 3-4                            3-4 of tiles 2 and 3
    """

    place: int
    """The dim in a result, from the last."""
    most: int
    """Its size on the tile that has most of it."""
    groups: list[tuple[list[int], int]]
    """For each part the tiles that share it, in the order of ranks, and its size."""

    @classmethod
    def of(cls, node: Node, context: Context, order: list[int]) -> KeptDim | None:
        """Returns it for a node; ``order``: the tile of each rank."""
        graph, stage, [source] = context.plan.graph, context.stage, node.inputs
        factors = dims_of(graph, stage, source)
        dim = kept_dim(node, factors)
        if dim is None:
            return None
        [(size, axis, parts)] = factors[dim]
        assert axis is not None
        dims = reduced_dims(node, shape_of(factors))
        keep = node.args.get("keepdim", node.kind not in REDUCTIONS)
        behind = sum(keep or other not in dims for other in range(dim, len(factors)))
        own = [divmod(tile, stage.tiles[1])[axis] for tile in order]
        groups = [
            ([rank for rank, one in enumerate(own) if one == index], end - first)
            for index, (first, end) in enumerate(split_all(size, parts))
            if end > first
        ]
        return cls(-behind, most_of(factors[dim]), groups)

    def filled_up(self, sent: Tensor) -> Tensor:
        """Returns numbers with zeros behind them: messages of all tiles have one size."""
        missing = self.most - sent.shape[self.place]
        return F.pad(sent, [0, 0] * (-self.place - 1) + [0, missing])

    def split(self, gathered: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Yields each part: its tiles in the order of ranks, and what they sent of it."""
        for ranks, size in self.groups:
            yield ranks, gathered[ranks].narrow(self.place, 0, size)

    def combined(self, gathered: Tensor, r: Reduced, combine: Callable[..., Any]) -> Any:
        """Returns what a combination makes of all parts."""
        made = []
        for ranks, sent in self.split(gathered):
            shares = r.shares[ranks]
            made.append(combine(sent, r._replace(shares=shares / shares.sum())))
        if isinstance(made[0], tuple):
            return tuple(torch.cat(one, self.place) for one in zip(*made, strict=True))
        return torch.cat(made, self.place)


def sum_over_tiles(own: Tensor, context: Context, node: str) -> Tensor:
    """Returns the sum of what all tiles computed at a node, the same bits on each."""
    place = context.tile_order.index(context.tile)
    sent = own.to(wide(own))
    gathered: Tensor = _GatherTiles.apply(sent, context.cursor, node, place)  # type: ignore[no-untyped-call]
    return gathered.sum(0).to(own.dtype)


class _GatherTiles(torch.autograd.Function):
    # Each tile's numbers -> those of all tiles, stacked in rank order so that all compute the same
    # bits of them. Each tile has the complete gradient: its own numbers take their part.
    @staticmethod
    def forward(ctx: Any, x: Tensor, cursor: Any, node: str, place: int) -> Tensor:
        ctx.place = place
        gathered: Tensor = cursor.gather(x.contiguous(), node)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.place], None, None, None


def _sum(x: Tensor, r: Reduced) -> Tensor:
    return x.sum(r.dims, r.keep)


declare("sum", _sum, lambda sums, r: sums.sum(0))
declare("mean adaptive_avg_pool2d", _sum, lambda sums, r: sums.sum(0) / r.numbers)


def _prod(x: Tensor, r: Reduced) -> Tensor:
    for dim in reversed(r.dims):  # torch has a product of one dim or of all
        x = x.prod(dim, r.keep)
    return x


declare("prod", _prod, lambda products, r: products.prod(0))


def _logsumexp(x: Tensor, r: Reduced) -> Tensor:
    return x.logsumexp(r.dims, r.keep) if x.numel() else r.filled(x, -math.inf)


declare("logsumexp", _logsumexp, lambda sums, r: sums.logsumexp(0))


def _order(r: Reduced) -> float:
    return float(r.args.get("ord", r.args.get("p", 2)))


def _norm(x: Tensor, r: Reduced) -> Tensor:
    return torch.linalg.vector_norm(x, _order(r), r.dims, r.keep) if x.numel() else r.filled(x, 0.0)


declare(
    "linalg_vector_norm norm",
    _norm,
    lambda norms, r: torch.linalg.vector_norm(norms, _order(r), 0),
)


def _extreme(largest: bool) -> tuple[Any, Any]:
    # Equal extremes of the whole image share the gradient: a tile gets as much as it has of them,
    # and torch's amax divides that among them.
    sign = 1 if largest else -1

    def local(x: Tensor, r: Reduced) -> Tensor:
        if not x.numel():
            value = r.filled(x, -math.inf)
            return torch.stack([value, torch.zeros_like(value)])
        value = (sign * x).amax(r.dims, keepdim=True)
        ties = (sign * x == value).sum(r.dims, r.keep)
        value = value if r.keep else value.squeeze(r.dims)
        return torch.stack([value, ties.to(value)])

    def combine(sent: Tensor, r: Reduced) -> Tensor:
        values, ties = sent.unbind(1)
        top = values.detach().amax(0)
        ties = torch.where(values.detach() == top, ties.detach(), 0.0)
        share = ties / ties.sum(0)
        # The value is the extreme itself; zero times a share carries the gradient.
        change = torch.where(ties > 0, values - top, 0.0)
        return sign * (top + (share * change).sum(0))

    return local, combine


def _first_extreme(largest: bool) -> tuple[Any, Any]:
    # Of equal extremes the first one has the gradient. Its row and its column travel apart: single
    # precision counts the pixels of no map of more than 4096 x 4096.
    sign = 1 if largest else -1

    def local(x: Tensor, r: Reduced) -> Tensor:
        if not x.numel():
            value = r.filled(x, -math.inf)
            return torch.stack([value, torch.zeros_like(value), torch.zeros_like(value)])
        if "output_size" in r.args:
            value, index = F.adaptive_max_pool2d(x, 1, return_indices=True)
        else:
            value, index = (sign * x).max(r.dims[0], r.keep)
        inner = local_size(r.along[-1], r.rect) if len(r.along) > 1 else 1
        numbers = zip(r.along, (index // inner, index % inner), strict=False)
        places = [number + r.rect[2 * (factor.axis or 0)] for factor, number in numbers]
        return torch.stack([value, *(p.to(value) for p in [*places, index * 0][:2])])

    def combine(sent: Tensor, r: Reduced) -> tuple[Tensor, Tensor]:
        values, outer, inner = sent.unbind(1)
        width = r.along[-1].size if len(r.along) > 1 else 1
        index = outer.detach().long() * width + inner.detach().long()
        best = values.detach().amax(0)
        beaten = (values.detach() != best) & ~values.detach().isnan()
        last = math.prod(factor.size for factor in r.along)
        first = index.masked_fill(beaten, last).argmin(0, keepdim=True)
        return sign * values.gather(0, first)[0], index.gather(0, first)[0]

    return local, combine


def _either(largest: bool) -> tuple[Any, Any]:
    # max() of everything, or max(dim).
    of_all, of_dim = _extreme(largest), _first_extreme(largest)

    def local(x: Tensor, r: Reduced) -> Tensor:
        return (of_dim if "dim" in r.args else of_all)[0](x, r)  # type: ignore[no-any-return]

    def combine(sent: Tensor, r: Reduced) -> Any:
        return (of_dim if "dim" in r.args else of_all)[1](sent, r)

    return local, combine


def _place(largest: bool) -> tuple[Any, Any]:
    local, combine = _first_extreme(largest)
    return local, lambda sent, r: combine(sent, r)[1]


declare("amax", *_extreme(largest=True))
declare("amin", *_extreme(largest=False))
declare("max", *_either(largest=True))
declare("min", *_either(largest=False))
declare("argmax", *_place(largest=True))
declare("argmin", *_place(largest=False))
declare("adaptive_max_pool2d", *_first_extreme(largest=True))


def _moments(x: Tensor, r: Reduced) -> Tensor:
    if not x.numel():
        value = r.filled(x, 0.0)
        return torch.stack([value, value])
    var, mean = torch.var_mean(x, r.dims, correction=0, keepdim=r.keep)
    return torch.stack([mean, var])


def _variance_and_mean(sent: Tensor, r: Reduced) -> tuple[Tensor, Tensor]:
    mean, var = combine_moments(sent, r.shares)
    correction = r.args.get("correction")
    if correction is None:
        correction = float(r.args.get("unbiased", True))
    # As a tensor, by which 0 divides to what torch returns.
    return var * r.numbers / var.new_tensor(max(r.numbers - correction, 0.0)), mean


def _root(var: Tensor) -> Tensor:
    # Zero has the gradient zero, as in torch.
    positive = var > 0
    return torch.where(positive, torch.where(positive, var, 1.0).sqrt(), 0.0)


def _deviation_and_mean(sent: Tensor, r: Reduced) -> tuple[Tensor, Tensor]:
    var, mean = _variance_and_mean(sent, r)
    return _root(var), mean


declare("var", _moments, lambda sent, r: _variance_and_mean(sent, r)[0])
declare("std", _moments, lambda sent, r: _deviation_and_mean(sent, r)[0])
declare("var_mean", _moments, _variance_and_mean)
declare("std_mean", _moments, _deviation_and_mean)
