"""Turns a tile of any value into its map, which messages and crops are made of, and back."""

from __future__ import annotations

from torch import Tensor

from hires.plan.factors import Dims, local_factors, local_shape, map_order, map_shape
from hires.plan.graph import Rect


def to_map(x: Tensor, dims: Dims, rect: Rect) -> Tensor:
    """Returns the map (n, C, h, w) of a value's tile, which holds ``rect``; a view if possible."""
    n, channels, *_ = map_shape(dims)
    factors = x.reshape(local_factors(dims, rect)).permute(map_order(dims))
    return factors.reshape(n, channels, rect[1] - rect[0], rect[3] - rect[2])


def from_map(y: Tensor, dims: Dims, rect: Rect) -> Tensor:
    """Returns a value's tile from its map (n, C, h, w), which holds ``rect``."""
    order, sizes = map_order(dims), local_factors(dims, rect)
    places = sorted(range(len(order)), key=order.__getitem__)
    factors = y.reshape([sizes[place] for place in order]).permute(places)
    return factors.reshape(local_shape(dims, rect))


def tile_of(whole: Tensor, dims: Dims, rect: Rect) -> Tensor:
    """Returns the part of a complete value that a tile holds, if tiles cut it as ``dims`` say."""
    factors = [factor for dim in dims for factor in dim]
    part = whole.reshape([factor.size for factor in factors])
    for place, factor in enumerate(factors):
        if factor.axis is not None:
            first, end = rect[2 * factor.axis : 2 * factor.axis + 2]
            part = part.narrow(place, first, end - first)
    return part.reshape(local_shape(dims, rect))
