"""Windowed operations of one tile: convolution, pools, padding, crops, interpolation, shuffles.

Each gathers its window (own pixels, halo and the ring outside the image) and computes on it what
the whole-image operation would compute for the pixels of the output that the tile owns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.context import Context
from hires.parallel.convolution import convolve, convolve_transposed
from hires.parallel.halo import Borrowed, Exchange, Frame, crop, gather_window, part
from hires.parallel.strips import Strips, strip_convolution, strips_of
from hires.plan.graph import Node, Rect
from hires.plan.operators.operator_facts import facts_of
from hires.plan.rules import window_axes_of
from hires.plan.tiling import Axes, Axis, inside, is_empty, need_of

Kernel = Callable[["Window", Tensor, dict[str, Any]], Tensor]

WINDOW_KERNELS: Registry[Kernel] = Registry("window kernel")
"""ATen name -> computes an operator on the pixels of its window, from its arguments by name."""


class Window:
    """One windowed node on one tile.

    In a dim that is not cut, convolution and pools keep their own padding, so that nothing is
    copied there.
    """

    def __init__(self, node: Node, context: Context, exchange: Exchange | None) -> None:
        graph = context.plan.graph
        [source] = node.inputs[:1]
        shape_in = graph.shape(source)
        axes, facts = window_axes_of(node, graph), facts_of(node.kind).window
        assert axes is not None
        assert facts is not None
        assert node.shape is not None
        self.axes: Axes = axes
        self.out = context.extent(node.name)
        self.shape = (*node.shape[:2], self.out[1] - self.out[0], self.out[3] - self.out[2])
        self.held = context.extent(source)
        self.size = shape_in[2], shape_in[3]
        grid = context.stage.tiles
        self.ring = facts.ring
        # A padding of "same" or "valid" is a word that is not handed on.
        padded = facts.pads and not isinstance(node.args["padding"], str)
        self.native = [padded and grid[dim] == 1 for dim in (0, 1)]
        self.rect = self._rect(need_of(axes, self.out))
        self.blank = 0 in self.shape or is_empty(self.rect)
        self.local = exchange is None and not is_empty(self.rect) and inside(self.rect, self.held)
        if self.local and facts.strips and padded:
            self.rect = self._without_crop()
        self.kernel = WINDOW_KERNELS[node.kind]
        self.dtype = context.dtype
        self.strips: Strips | None = None
        if facts.strips and padded and not (self.local or self.blank):
            overlap = context.plan.halo_overlap
            if overlap == "auto" and context.tiles.shared is not None:
                overlap = "off"  # what comes through memory is there as soon as it is sent
            self.strips = strips_of(axes, self.held, self.out, overlap)

    def __call__(self, x: Tensor, borrowed: Borrowed | None, args: dict[str, Any]) -> Tensor:
        """Returns this tile of the node's value from what the tile holds and borrows of its input.

        ``borrowed`` is None if the tile holds all pixels of the image that it needs.
        """
        if self.strips is not None:
            return strip_convolution(x.to(self.dtype), borrowed, self.strips, args)
        ring = args.get(self.ring) if isinstance(self.ring, str) else self.ring
        fill = float(ring or 0.0)
        if self.local:
            window = crop(x, self.held, self.rect)
        else:
            window = gather_window(x, borrowed, Frame(self.held, self.rect, self.size, fill))
        if self.blank:
            blank: Tensor = Blank.apply(window, self.shape)  # type: ignore[no-untyped-call]
            bias = args.get("bias")
            return blank if bias is None else blank + bias.view(1, -1, 1, 1)
        return self.kernel(self, window, args)

    def padding(self, index: int) -> int:
        """Returns the padding that the operation itself applies in a dim."""
        return self.axes[index].padding if self.native[index] else 0

    def _rect(self, need: Rect) -> Rect:
        """Returns the window: what is needed, with the ring outside the image where one is used."""
        if is_empty(self.out) or self.ring is None:
            return need
        rect: list[int] = []
        for index, out in enumerate((self.out[:2], self.out[2:])):
            axis = self.axes[index]
            rect += (0, axis.size_in) if self.native[index] else axis.reach(out)
        return rect[0], rect[1], rect[2], rect[3]

    def _without_crop(self) -> Rect:
        """Returns the window with the rows and columns behind it that a stride passes over anyway.

        A convolution of stride 2 that ends one row before the tile would need a copy of the tile's
        gradient without that row.
        """
        rect = list(self.rect)
        for index, axis in enumerate(self.axes):
            end, held_end = rect[2 * index + 1], self.held[2 * index + 1]
            if not self.native[index] and held_end - end < axis.stride:
                rect[2 * index + 1] = held_end
        return rect[0], rect[1], rect[2], rect[3]


class Blank(torch.autograd.Function):
    """Zeros that depend on a window in name only, so that its exchange has a way back."""

    @staticmethod
    def forward(ctx: Any, window: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Returns zeros."""
        ctx.like = window.shape
        return window.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """No pixel of the window had an influence."""
        return grad.new_zeros(ctx.like), None


@WINDOW_KERNELS.register("conv2d")
def _convolution(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Convolution."""
    padding = [w.padding(0), w.padding(1)]
    return convolve(
        x, args["weight"], args["bias"], args["stride"], padding, args["dilation"], args["groups"]
    )


@WINDOW_KERNELS.register("max_pool2d")
def _max_pool(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Maximum; the ring is -inf, so it never wins."""
    return F.max_pool2d(
        x,
        args["kernel_size"],
        args["stride"] or None,
        [w.padding(0), w.padding(1)],
        args["dilation"],
        args["ceil_mode"],
    )


@WINDOW_KERNELS.register("avg_pool2d")
def _avg_pool(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Mean, with the divisor of the whole image's borders."""
    total = F.avg_pool2d(
        x,
        args["kernel_size"],
        args["stride"] or None,
        [w.padding(0), w.padding(1)],
        args["ceil_mode"],
        divisor_override=1,
    )
    if args["divisor_override"]:
        scale: float = args["divisor_override"]
        return total / scale
    rows, cols = (
        _counts(axis, out, args["count_include_pad"])
        for axis, out in zip(w.axes, (w.out[:2], w.out[2:]), strict=True)
    )
    divisor = torch.tensor(rows, dtype=x.dtype).view(-1, 1) * torch.tensor(cols, dtype=x.dtype)
    mean: Tensor = total / divisor.to(x.device)
    return mean


def _counts(axis: Axis, out: tuple[int, int], with_padding: bool) -> list[int]:
    """Returns by how many rows (or columns) the mean of each output row divides."""
    counts = []
    for index in range(*out):
        low = index * axis.stride - axis.padding
        high = min(low + axis.kernel, axis.size_in + axis.padding)
        counts.append(high - low if with_padding else min(high, axis.size_in) - max(low, 0))
    return counts


@WINDOW_KERNELS.register("conv_transpose2d")
def _conv_transpose(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Transposed convolution: all that the window's pixels add to, cut to the tile's own rows."""
    raw = convolve_transposed(
        x, args["weight"], None, args["stride"], 0, 0, args["groups"], args["dilation"]
    )
    pads: list[int] = []
    for dim in (1, 0):  # F.pad counts from the last dim
        axis, first = w.axes[dim], w.rect[2 * dim]
        begin = first * axis.stride - axis.padding  # output row of the first raw row
        wanted = w.out[2 * dim : 2 * dim + 2]
        pads += [begin - wanted[0], wanted[1] - (begin + raw.shape[2 + dim])]
    y = F.pad(raw, pads)
    return y if args["bias"] is None else y + args["bias"].view(1, -1, 1, 1)


@WINDOW_KERNELS.register("pad")
@WINDOW_KERNELS.register("constant_pad_nd")
@WINDOW_KERNELS.register("slice")
def _crop(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Padding and cropping: the window is the answer, but for a step."""
    return x[:, :, :: w.axes[0].stride, :: w.axes[1].stride]


@WINDOW_KERNELS.register("upsample_nearest2d")
@WINDOW_KERNELS.register("_upsample_nearest_exact2d")
@WINDOW_KERNELS.register("upsample_bilinear2d")
def _interpolation(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Nearest or bilinear interpolation, rows then columns."""
    narrow = x.dtype
    wide = x if narrow == torch.float64 else x.float()
    for dim, axis in enumerate(w.axes):
        first = w.rect[2 * dim]
        sources = [axis.sources(index) for index in range(*w.out[2 * dim : 2 * dim + 2])]
        low = torch.tensor([s[0] - first for s in sources], device=x.device)
        mixed = wide.index_select(2 + dim, low)
        if axis.kind.startswith("linear"):
            high = torch.tensor([s[1] - first for s in sources], device=x.device)
            shape = [1, 1, 1, 1]
            shape[2 + dim] = -1
            weight = torch.tensor([s[2] for s in sources], dtype=wide.dtype, device=x.device)
            mixed = mixed.lerp(wide.index_select(2 + dim, high), weight.view(shape))
        wide = mixed
    return wide.to(narrow)


@WINDOW_KERNELS.register("pixel_shuffle")
def _shuffle(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """PixelShuffle, cut to the tile's own rows and columns."""
    factor = w.axes[0].stride
    whole = F.pixel_shuffle(x, factor)
    origin = tuple(edge * factor for edge in w.rect)
    return part(whole, (origin[0], origin[1], origin[2], origin[3]), w.out)
