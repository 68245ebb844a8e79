"""Turns a tile of any value into its map, which messages and crops are made of, and back."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from hires.plan.factors import Dims, local_factors, local_shape, map_order, map_shape
from hires.plan.graph import Node, Rect
from hires.plan.operators.operator_facts import facts_of


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


def on_tile(node: Node, dims: Dims, rect: Rect) -> Node:
    """Returns the operation with which a tile makes its part of a node's value.

    Sizes among the arguments become those of the part. A reshape is computed as such whatever its
    name: a part lies in memory in another order than the whole.
    """
    ways, sizes = facts_of(node.kind).tiling, local_shape(dims, rect)
    source = {"self": next(iter(node.args.values()))}
    if "regrouped" in ways:
        return dataclasses.replace(node, op="reshape.default", args={**source, "shape": sizes})
    if "expanded" in ways:
        args = {**source, "size": sizes, "implicit": False}
        return dataclasses.replace(node, op="expand.default", args=args)
    return node
