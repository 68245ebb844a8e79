"""Gathers the tiles of a value into a whole one, crops whole values to tiles, and both ways back.

    gather   forward    own pixels -> all tiles -> whole       backward   whole -> own pixels
    crop     forward    whole -> own pixels                    backward   own pixels -> all -> whole

What lies between them is computed alike on all tiles, so the gradient of a whole value is complete
on each: on the way back a gather needs no message, and a crop those that a gather has forward.
Shards have a part of that gradient each, so there the gather also has messages on the way back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.context import Context
from hires.parallel.halo import Piece, new_map, new_part, part, paste
from hires.parallel.image_kernels import Operator, Values
from hires.plan.factors import Dims, local_factors, local_shape, map_order, map_shape
from hires.plan.graph import Node, Rect
from hires.plan.groups import sent_as
from hires.plan.halos import map_grid
from hires.plan.operators.operator_facts import facts_of
from hires.plan.rules import TILED, dims_of
from hires.plan.tiling import own_rect

CONVERSIONS: Registry[Callable[[Node, Context, dict[str, Tensor]], Operator]] = Registry(
    "conversion"
)
"""Rule -> makes the callable of a node that brings a value from tiles to whole, or back."""


class _Conversion:
    # One conversion on one rank. Messages are pieces of the map (n, C, rows, cols) of the value
    # that the ranks divide; to shards its samples are the rows.
    def __init__(self, node: Node, context: Context, divided: str) -> None:
        graph, stage = context.plan.graph, context.stage
        self.node, self.cursor, self.tiles = node.name, context.cursor, context.tiles
        self.dims = dims_of(graph, stage, divided)
        _, _, rows, cols = map_shape(self.dims)
        self.whole: Rect = (0, rows, 0, cols)
        self.own = own_rect([rows, cols], map_grid(stage), context.tile)
        is_map = stage.layout[divided] == TILED and divided not in stage.factors
        self.order = torch.channels_last if is_map else torch.preserve_format
        dtype, _ = sent_as(context.plan, divided, "gather")
        self.dtype: torch.dtype = getattr(torch, dtype)
        comm = [(n, op) for n, op in enumerate(stage.comm) if op.node == node.name]
        self.number = comm[0][0] if comm else None
        self.returns = bool(comm) and comm[0][1].back  # whether gradients travel

    def exchange(self, x: Tensor, held: Rect, back: bool) -> list[Piece]:
        """Sends parts of a map of which this rank holds a rectangle; returns what arrives."""
        for event in self.cursor.posts(self.node, back):
            sends = event.kind == "send"
            tensor = part(x, held, event.rect) if sends else new_map(x, event.shape)
            self.cursor.post(event, tensor, self.tiles)
        return [] if self.number is None else self.cursor.waits(self.number, back)

    def gather(self, own: Tensor, back: bool = False) -> Tensor:
        """Returns the whole value of which every rank holds a part; of gradients if ``back``."""
        sent = to_map(own, self.dims, self.own).to(self.dtype)
        pieces = [(self.own, sent), *self.exchange(sent, self.own, back)]
        whole = new_part(sent, self.whole)
        paste(whole, self.whole, pieces, self.whole)
        return usual_strides(from_map(whole, self.dims, self.whole).to(own.dtype))

    def keep_own(self, whole: Tensor) -> Tensor:
        """Returns a copy of this rank's part, so that the whole value need not be kept."""
        return tile_of(whole, self.dims, self.own).clone(memory_format=self.order)

    def sum_own(self, whole: Tensor) -> Tensor:
        """Returns the sum of the gradients that all ranks have for this rank's part."""
        sent = to_map(whole, self.dims, self.whole).to(self.dtype)
        own = part(sent, self.whole, self.own).to(whole.dtype, copy=True)
        for rect, grad in self.exchange(sent, self.whole, back=True):
            part(own, self.own, rect).add_(grad)
        return from_map(own, self.dims, self.own)


def usual_strides(x: Tensor) -> Tensor:
    """Returns a channels-last map of one sample with the strides of an allocated one, as a view.

    A reshape leaves any stride to a dim of length 1, and by that of the samples torch 2.13 takes
    channels-last gradients for contiguous ones: ``native_batch_norm_backward`` mixed the channels.
    """
    if x.dim() != 4 or x.shape[0] != 1 or not x.is_contiguous(memory_format=torch.channels_last):
        return x
    _, channels, rows, cols = x.shape
    return x.as_strided(x.shape, (rows * cols * channels, 1, cols * channels, channels))


class _Gather(torch.autograd.Function):
    # what a tile holds -> the whole value
    @staticmethod
    def forward(ctx: Any, own: Tensor, conversion: _Conversion) -> Tensor:
        ctx.conversion = conversion
        return conversion.gather(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        conversion: _Conversion = ctx.conversion
        kept = conversion.sum_own if conversion.returns else conversion.keep_own
        return kept(grad), None


class _Crop(torch.autograd.Function):
    # the whole value -> what a tile holds
    @staticmethod
    def forward(ctx: Any, whole: Tensor, conversion: _Conversion) -> Tensor:
        ctx.conversion = conversion
        return conversion.keep_own(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.conversion.gather(grad, back=True), None


@CONVERSIONS.register("gather")
def _gather(node: Node, context: Context, tensors: dict[str, Tensor]) -> Operator:
    [value] = node.inputs
    conversion = _Conversion(node, context, value)
    held = context.extent(value) if context.stage.num_tiles > 1 else conversion.own

    def run(values: Values) -> Tensor:
        own = part(values[value], held, conversion.own)
        return _Gather.apply(own, conversion)  # type: ignore[no-any-return,no-untyped-call]

    return run


@CONVERSIONS.register("crop")
def _crop(node: Node, context: Context, tensors: dict[str, Tensor]) -> Operator:
    [source] = node.args.values()
    conversion = _Conversion(node, context, node.name)
    if "param" in source:  # each tile has a part of its gradient, summed at the end of the step
        tensor = tensors[source["param"]]
        return lambda values: tile_of(tensor, conversion.dims, conversion.own)
    value = source["value"]

    def run(values: Values) -> Tensor:
        if conversion.returns:
            return _Crop.apply(values[value], conversion)  # type: ignore[no-any-return,no-untyped-call]
        return conversion.keep_own(values[value])

    return run


class _CountOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return grad if ctx.counts else None, None


def count_once(parameter: Tensor, tile: int) -> Tensor:
    """Returns a parameter to which only tile 0 adds the gradient of a use that is whole on all."""
    return _CountOnce.apply(parameter, tile == 0)  # type: ignore[no-any-return,no-untyped-call]


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
