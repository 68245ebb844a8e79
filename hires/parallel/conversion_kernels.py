"""Gathers the tiles of a value into a whole one, crops whole values to tiles, and both ways back.

    gather   forward    own pixels -> all tiles -> whole       backward   whole -> own pixels
    crop     forward    whole -> own pixels                    backward   own pixels -> all -> whole

What lies between them is computed alike on all tiles, so the gradient of a whole value is complete
on each: on the way back a gather needs no message, and a crop those that a gather has forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.context import Context
from hires.parallel.halo import new_map, new_part, part, paste
from hires.parallel.image_kernels import Operator, Values
from hires.plan.graph import Node, Rect
from hires.plan.halos import map_shape

CONVERSIONS: Registry[Callable[[Node, Context, dict[str, Tensor]], Operator]] = Registry(
    "conversion"
)
"""Rule -> makes the callable of a node that brings a value from tiles to whole, or back."""


class _Conversion:
    # One conversion on one rank; tensors are maps (n, C, rows, cols).
    def __init__(self, node: Node, context: Context, value: str) -> None:
        self.node, self.cursor, self.tiles = node.name, context.cursor, context.tiles
        _, _, rows, cols = map_shape(context.plan.graph, context.stage, value)
        self.whole: Rect = (0, rows, 0, cols)
        self.own = context.own([rows, cols])
        self.dtype: torch.dtype = getattr(torch, context.plan.dtype_of(value))
        self.numbers = [n for n, op in enumerate(context.stage.comm) if op.node == node.name]

    def all_pixels(self, own: Tensor, back: bool) -> Tensor:
        """Returns the whole map of which this tile holds its own pixels; of gradients if back."""
        sent = own.to(self.dtype)
        for event in self.cursor.posts(self.node, back):
            tensor = sent if event.kind == "send" else new_map(sent, event.shape)
            self.cursor.post(event, tensor, self.tiles)
        pieces = [(self.own, sent)]
        for number in self.numbers:
            pieces += self.cursor.waits(number, back)
        whole = new_part(sent, self.whole)
        paste(whole, self.whole, pieces, self.whole)
        return whole.to(own.dtype)

    def own_pixels(self, whole: Tensor) -> Tensor:
        """Returns a copy of this tile's pixels, so that the whole map need not be kept."""
        return part(whole, self.whole, self.own).clone(memory_format=torch.channels_last)


class _Gather(torch.autograd.Function):
    # (n, C, h, w) -> (n, C, H, W)
    @staticmethod
    def forward(ctx: Any, own: Tensor, conversion: _Conversion) -> Tensor:
        ctx.conversion = conversion
        return conversion.all_pixels(own, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.conversion.own_pixels(grad), None


class _Crop(torch.autograd.Function):
    # (n, C, H, W) -> (n, C, h, w)
    @staticmethod
    def forward(ctx: Any, whole: Tensor, conversion: _Conversion) -> Tensor:
        ctx.conversion = conversion
        return conversion.own_pixels(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.conversion.all_pixels(grad, back=True), None


@CONVERSIONS.register("gather")
def _gather(node: Node, context: Context, tensors: dict[str, Tensor]) -> Operator:
    [value] = node.inputs
    conversion, held = _Conversion(node, context, value), context.extent(value)

    def run(values: Values) -> Tensor:
        own = part(values[value], held, conversion.own)
        return _Gather.apply(own, conversion)  # type: ignore[no-any-return,no-untyped-call]

    return run


@CONVERSIONS.register("crop")
def _crop(node: Node, context: Context, tensors: dict[str, Tensor]) -> Operator:
    assert node.shape is not None
    shape, [source] = node.shape, node.args.values()
    if "param" in source:  # each tile has a part of its gradient, summed at the end of the step
        tensor, whole = tensors[source["param"]], (0, shape[2], 0, shape[3])
        own = context.own(shape[2:])
        return lambda values: part(tensor.reshape(shape), whole, own)
    value = source["value"]
    conversion = _Conversion(node, context, value)

    def run(values: Values) -> Tensor:
        x = values[value].reshape(shape)
        if not conversion.numbers:  # no gradient comes back
            return conversion.own_pixels(x)
        return _Crop.apply(x, conversion)  # type: ignore[no-any-return,no-untyped-call]

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
