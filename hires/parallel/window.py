"""Computes windowed operators on one tile: convolution, pools, pads, crops, scaling.

A tile gathers its window, and the kernel of the operator computes on it exactly the outputs that
the tile owns. For a 3x3 kernel with padding 1 and a tile at the upper edge of the image:

    r r r r r r     r  ring outside the image: what the whole-image operator takes there
    h o o o o h        (0 for convolution, -inf for max-pool, the argument of a pad)
    h o o o o h     o  own pixels
    h h h h h h     h  halo, borrowed from other tiles

The window holds its padding already, so the kernel runs with padding 0.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.context import Context
from hires.parallel.fused_products import FusedConvolution, with_sum_and_activation
from hires.parallel.halo import Borrowed, Exchange, Frame, gather_window, part
from hires.parallel.row_pools import max_pool_by_rows
from hires.parallel.strips import Strips, by_strips, strip_convolution, strips_of
from hires.parallel.torch_faults import (
    SUBSTITUTES,
    Size,
    by_plain_onednn,
    convolve,
    convolve_transposed,
    product_type,
)
from hires.plan.graph import Node, Rect
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.windows import pair
from hires.plan.resampling import RESAMPLINGS, Taps
from hires.plan.routes import MEMORY
from hires.plan.rules import window_axes_of
from hires.plan.tiling import CIRCULAR, Axes, inside, is_empty, need_of
from hires.plan.traffic import backends_of_plan
from hires.quant.int8_kernels import OnednnProduct

Kernel = Callable[["Window", Tensor, dict[str, Any]], Tensor]

ROWS_FROM = 2**17
"""Numbers of a map from which pools by rows are faster."""
WINDOW_KERNELS: Registry[Kernel] = Registry("window kernel")
"""ATen name -> computes an operator on the pixels of its window, from its arguments by name."""


class Window:
    """One windowed node on one tile; rectangles are in pixels of the whole map."""

    def __init__(
        self,
        node: Node,
        context: Context,
        exchange: Exchange | None,
        fused: FusedConvolution | None = None,
        *,
        whole: bool = False,
        overwrites: bool = False,
    ) -> None:
        """``whole``: the rank computes all of the value, as from a whole input.

        ``overwrites``: its value may be written over the one beside the window.
        """
        graph, source = context.plan.graph, node.inputs[0]
        axes, facts = window_axes_of(node, graph), facts_of(node.kind).window
        self.multiplies = facts_of(node.kind).multiplies
        self.fused = fused  # with what follows the window
        self.overwrites = overwrites
        self.adds = node.args.get(facts_of(node.kind).beside) is not None  # another map
        self.product: OnednnProduct | None = None  # of 8 bits, for the window's own shape
        self.by_phase: dict[str, Tensor] = {}  # scales of a transposed product's channels
        assert axes is not None
        assert facts is not None
        assert node.shape is not None
        self.axes: Axes = axes
        self.size = (axes[0].size_in, axes[1].size_in)
        self.size_out = (axes[0].size_out, axes[1].size_out)
        # The pixels that it makes, and those that it holds of its input.
        self.out = _all_of(self.size_out) if whole else context.extent(node.name)
        self.held = _all_of(self.size) if whole else context.extent(source)
        self.shape = (*node.shape[:2], self.out[1] - self.out[0], self.out[3] - self.out[2])
        self.ring = facts.ring
        # A padding "same" may be uneven, and torch's kernels pad both sides by one number.
        padded = facts.pads and not isinstance(node.args["padding"], str)
        # In a dim that is not cut, torch's kernel pads by itself, which saves a copy.
        self.native = [padded and (whole or parts == 1) for parts in context.stage.tiles]
        pads = [axis.padding if n else 0 for axis, n in zip(axes, self.native, strict=True)]
        self.padding = pads  # padding that torch's kernel applies in each dim
        self.rect = need_of(axes, self.out)
        self.turns = axes[0].kind == CIRCULAR, axes[1].kind == CIRCULAR
        if self.ring is not None and not is_empty(self.out):
            dims = zip(axes, self.native, (self.out[:2], self.out[2:]), strict=True)
            rows, cols = ((0, a.size_in) if native else a.reach(out) for a, native, out in dims)
            self.rect = rows + cols
        if any(self.turns) and not is_empty(self.rect):
            rows, cols = self.rect[:2], self.rect[2:]
            rows = axes[0].reach(self.out[:2]) if self.turns[0] else rows
            self.rect = rows + (axes[1].reach(self.out[2:]) if self.turns[1] else cols)
        self.blank = 0 in self.shape or is_empty(self.rect)  # the tile makes no pixel, or only 0
        self.local = exchange is None and not is_empty(self.rect) and inside(self.rect, self.held)
        if self.local and facts.strips and padded:
            self.rect = self._without_crop()
        self.kernel = WINDOW_KERNELS[node.kind]
        self.strips: Strips | None = None
        if facts.strips and padded and not (self.local or self.blank):
            overlap = context.plan.halo_overlap
            if overlap == "auto" and {*MEMORY} & {*backends_of_plan(context.plan)}:
                overlap = "off"  # pixels in shared memory arrive as soon as they are sent
            self.strips = strips_of(axes, self.held, self.out, overlap)

    def __call__(self, x: Tensor, borrowed: Borrowed | None, args: dict[str, Any]) -> Tensor:
        """Returns this tile of the node's value from what it holds, and borrows, of its input."""
        if self.multiplies and x.is_floating_point():
            x = x.to(product_type(x))  # as autocast would, but before the window is copied
        if self.strips is not None:
            if not x.is_floating_point():
                return self._strips_of_numbers(x, borrowed, self.strips, args)
            return self._finished(strip_convolution(x, borrowed, self.strips, args), args)
        ring = args.get(self.ring) if isinstance(self.ring, str) else self.ring
        fill = float(ring or 0.0)
        if fill == -math.inf and not x.is_floating_point():
            fill = float(torch.iinfo(x.dtype).min)
        if self.local:
            window = part(x, self.held, self.rect)
        else:
            frame = Frame(self.held, self.rect, self.size, fill, turns=self.turns)
            window = gather_window(x, borrowed, frame)
        if self.blank:
            # The sum ties the zeros to the window, so that its exchange also runs backward: the
            # neighbours wait for the messages of a tile that makes no pixel, too.
            blank = window.new_zeros(self.shape)
            if not window.is_floating_point():  # no gradient flows to it
                return blank.to(args.get("dtype") or blank.dtype)
            blank = blank + 0 * window.sum()
            bias, weight = args.get("bias"), args.get("weight")
            if isinstance(weight, Tensor) and not weight.is_leaf:  # computed, so shared by tiles
                blank = blank + 0 * weight.sum()
            blank = blank if bias is None else blank + bias.view(1, -1, 1, 1)
            return self._finished(blank, args)
        return self.kernel(self, window, args)

    def _strips_of_numbers(
        self, x: Tensor, borrowed: Borrowed | None, strips: Strips, args: dict[str, Any]
    ) -> Tensor:
        # The kernel adds and rescales before it rounds, so it gets the part of what it adds. That
        # is read again for the borders: nothing is written over it.
        def compute(window: Tensor, padding: list[int], out: Rect) -> Tensor:
            one, other = copy.copy(self), args["other"]
            one.padding, one.overwrites, one.product = padding, False, None
            other = None if other is None else part(other, self.out, out)
            return self.kernel(one, window, {**args, "other": other})

        assert isinstance(self.ring, str)
        return by_strips(x, borrowed, strips, compute, float(args[self.ring]))

    def _finished(self, y: Tensor, args: dict[str, Any]) -> Tensor:
        # What a fused operator does behind its window.
        if self.fused is None:
            return y
        return with_sum_and_activation(y, args.get("other"), args.get("activation"))

    @functools.cached_property
    def taps(self) -> dict[int, list[Taps]]:
        """By dim the first tap of every output row, the second ones ..., in rows of the window.

        Where a row has fewer taps than others, its last one is repeated with the weight 0.
        """
        by_dim = {}
        for dim, axis in enumerate(self.axes, start=2):
            if axis.kind in RESAMPLINGS:
                out, first = self.out[2 * dim - 4 : 2 * dim - 2], self.rect[2 * dim - 4]
                rows = [axis.taps(index) for index in range(*out)]
                most = max(map(len, rows))
                filled = (taps + [(taps[-1][0], 0.0)] * (most - len(taps)) for taps in rows)
                moved = ([(row - first, weight) for row, weight in taps] for taps in filled)
                by_dim[dim] = [list(taps) for taps in zip(*moved, strict=True)]
        return by_dim

    def _without_crop(self) -> Rect:
        # A convolution of stride 2 may end one row before the tile. Without that row the window
        # would be a crop, whose gradient is a copy of the whole tile.
        rect = list(self.rect)
        for end, axis, native in zip((1, 3), self.axes, self.native, strict=True):
            if not native and self.held[end] - rect[end] < axis.stride:
                rect[end] = self.held[end]
        return rect[0], rect[1], rect[2], rect[3]


def _all_of(size: tuple[int, int]) -> Rect:
    return 0, size[0], 0, size[1]


@WINDOW_KERNELS.register("conv2d")
def _convolution(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    if w.fused is not None:
        return _fused_convolution(w, x, args)
    weight, bias, stride = args["weight"], args["bias"], args["stride"]
    return convolve(x, weight, bias, stride, w.padding, args["dilation"], args["groups"])


@WINDOW_KERNELS.register("fused_conv2d")
def _fused_convolution(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    assert w.fused is not None
    window = {**args, "input": x, "padding": w.padding}
    return w.fused(*window.values())


@WINDOW_KERNELS.register("max_pool2d")
def _max_pool(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    size, stride = args["kernel_size"], args["stride"] or None
    return max_pool(x, size, stride, w.padding, args["dilation"], args["ceil_mode"])


@SUBSTITUTES.register("max_pool2d")
def max_pool(
    x: Tensor,
    kernel_size: Size,
    stride: Size | None,
    padding: Size,
    dilation: Size,
    ceil_mode: bool,
) -> Tensor:
    """Returns the largest number of each window of (n, C, H, W), as torch's."""
    size, step, pads, apart = (
        pair(one) for one in (kernel_size, stride or kernel_size, padding, dilation)
    )
    if x.dtype == torch.uint8 or _is_pooled_by_rows(x):
        return max_pool_by_rows(x, size, step, pads, apart, ceil_mode=ceil_mode)
    return F.max_pool2d(x, size, step, pads, apart, ceil_mode)


def _is_pooled_by_rows(x: Tensor) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.dim() != 4:
        return False
    dense = x.is_contiguous(memory_format=torch.channels_last)
    return dense and by_plain_onednn(x) and x.numel() >= ROWS_FROM


@WINDOW_KERNELS.register("avg_pool2d")
def _avg_pool(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    # The divisor is that of the whole-image pool, which differs near the border of the image.
    size, stride = args["kernel_size"], args["stride"] or None
    total = F.avg_pool2d(x, size, stride, w.padding, args["ceil_mode"], divisor_override=1)
    mean: Tensor = total / pool_divisors(w, args, x)
    return mean


def pool_divisors(w: Window, args: dict[str, Any], like: Tensor) -> Tensor | float:
    """Returns by which each sum of an average pool is divided, (rows, columns)."""
    if args["divisor_override"]:
        scale: float = args["divisor_override"]
        return scale
    divisors = []
    for axis, out in zip(w.axes, (w.out[:2], w.out[2:]), strict=True):
        lows = [index * axis.stride - axis.padding for index in range(*out)]
        spans = [(low, min(low + axis.kernel, axis.size_in + axis.padding)) for low in lows]
        if not args["count_include_pad"]:
            spans = [(max(low, 0), min(high, axis.size_in)) for low, high in spans]
        divisors.append(torch.tensor([high - low for low, high in spans], dtype=like.dtype))
    return (divisors[0].view(-1, 1) * divisors[1]).to(like.device)


@WINDOW_KERNELS.register("conv_transpose2d")
def _conv_transpose(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    # All outputs that the window's pixels reach, cut to those that the tile makes.
    how = args["stride"], 0, 0, args["groups"], args["dilation"]
    raw = convolve_transposed(x, args["weight"], None, *how)
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
def _pad(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    if w.axes[0].kind in RESAMPLINGS:
        return _resample(w, x, args)
    channels = args["pad"][4:]
    # The window with its ring is the result.
    return F.pad(x, [0, 0, 0, 0, *channels], value=args["value"] or 0.0) if channels else x


@WINDOW_KERNELS.register("slice")
def _crop(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    return x[:, :, :: w.axes[0].stride, :: w.axes[1].stride]


@WINDOW_KERNELS.register("reflection_pad2d")
@WINDOW_KERNELS.register("replication_pad2d")
@WINDOW_KERNELS.register("roll")
@WINDOW_KERNELS.register("repeat_interleave")
@WINDOW_KERNELS.register("adaptive_avg_pool2d")
@WINDOW_KERNELS.register("upsample_nearest2d")
@WINDOW_KERNELS.register("_upsample_nearest_exact2d")
@WINDOW_KERNELS.register("upsample_bilinear2d")
@WINDOW_KERNELS.register("upsample_bicubic2d")
@WINDOW_KERNELS.register("_upsample_bilinear2d_aa")
@WINDOW_KERNELS.register("_upsample_bicubic2d_aa")
def _resample(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    return resampled(w, x).to(x.dtype)


def resampled(w: Window, x: Tensor) -> Tensor:
    """Returns rows and columns mixed, in single precision or better."""
    wide = x if x.dtype == torch.float64 else x.float()
    for dim, axis in enumerate(w.axes, start=2):
        if axis.kind not in RESAMPLINGS:  # roll along the other dim
            continue
        taps = w.taps[dim]
        if len(taps) == 1:  # a copy of rows
            wide = wide.index_select(dim, _rows(taps, x)[0])
            continue
        weights = [torch.tensor([part for _, part in tap], dtype=torch.float64) for tap in taps]
        shape = [-1 if other == dim else 1 for other in range(4)]
        parts = [weight.to(wide).view(shape) for weight in weights]
        rows = [wide.index_select(dim, row) for row in _rows(taps, x)]
        mixed = rows[0] * parts[0]
        for row, weight in zip(rows[1:], parts[1:], strict=True):
            # Of 8-bit integers every rank makes the same: no addition may be fused here alone.
            exact = x.dtype == torch.uint8
            mixed = mixed + row * weight if exact else torch.addcmul(mixed, row, weight)
        wide = mixed
    return wide


@WINDOW_KERNELS.register("adaptive_max_pool2d")
def _max_of_bins(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    # Along the columns, then along the rows: of equal maxima the first row by row has the gradient,
    # as in torch. Shorter bins repeat their last row.
    for dim in (3, 2):
        rows = _rows(w.taps[dim], x)
        apart = torch.unflatten(x.index_select(dim, rows.flatten()), dim, rows.shape)
        x = apart.max(dim).values  # the first of equal ones
    return x


def _rows(taps: list[Taps], x: Tensor) -> Tensor:
    return torch.tensor([[row for row, _ in tap] for tap in taps], device=x.device)


@WINDOW_KERNELS.register("pixel_unshuffle")
def _unshuffle(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    return F.pixel_unshuffle(x, args["downscale_factor"])


@WINDOW_KERNELS.register("pixel_shuffle")
def _shuffle(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    factor = w.axes[0].stride
    whole = F.pixel_shuffle(x, factor)
    origin = tuple(edge * factor for edge in w.rect)
    return part(whole, (origin[0], origin[1], origin[2], origin[3]), w.out)
