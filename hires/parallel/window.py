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

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.registry import imported
from hires.parallel.context import Context
from hires.parallel.fused_products import with_sum_and_activation
from hires.parallel.halo import Borrowed, Exchange, Frame, gather_window, part
from hires.parallel.strips import Strips, by_strips, strip_convolution, strips_of
from hires.parallel.torch_faults import (
    SUBSTITUTES,
    Size,
    by_plain_onednn,
    product_type,
)
from hires.plan.graph import Node, Rect
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.windows import pair
from hires.plan.routes import MEMORY
from hires.plan.rules import window_axes_of
from hires.plan.tiling import CIRCULAR, RESAMPLINGS, Axes, Taps, inside, is_empty, need_of
from hires.plan.traffic import backends_of_plan

ROWS_FROM = 2**17
"""Numbers of a map from which pools by rows are faster."""


@dataclass(frozen=True)
class Window:
    """One windowed node on one tile; rectangles are in pixels of the whole map."""

    kernel: Callable[[Window, Tensor, dict[str, Any]], Tensor]
    axes: Axes
    held: Rect
    """What the tile holds of the input."""
    rect: Rect
    """What it reads of that."""
    out: Rect
    """What it makes."""
    shape: tuple[int, ...]
    """Of the value there."""
    padding: list[int]
    """Rows and columns of the ring that torch's kernel makes by itself."""
    ring: float | str | None
    turns: tuple[bool, bool]
    """Whether rows, and columns, go on at the other end of the map."""
    is_local: bool
    """Whether the tile holds all that it reads."""
    multiplies: bool
    beside: str
    """The argument that lies like its value, and is added; empty: it has none."""
    adds: bool
    """Whether that is given."""
    overwrites: bool
    """Whether its value may be written over the one beside the window."""
    strips: Strips | None
    kept: dict[Any, Any] = field(default_factory=dict)
    """What kernels keep for this geometry: packed weights, divisors, rows of taps."""

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the input."""
        return self.axes[0].size_in, self.axes[1].size_in

    @property
    def is_blank(self) -> bool:
        """Whether the tile makes no pixel, or only zeros."""
        return 0 in self.shape or is_empty(self.rect)

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
        if self.is_local:
            window = part(x, self.held, self.rect)
        else:
            frame = Frame(self.held, self.rect, self.size, fill, turns=self.turns)
            window = gather_window(x, borrowed, frame)
        if self.is_blank:
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
            one = dataclasses.replace(self, padding=padding, overwrites=False, kept={})
            other = None if args["other"] is None else part(args["other"], self.out, out)
            return self.kernel(one, window, {**args, "other": other})

        assert isinstance(self.ring, str)
        return by_strips(x, borrowed, strips, compute, float(args[self.ring]))

    def _finished(self, y: Tensor, args: dict[str, Any]) -> Tensor:
        # What a fused operator does behind its window.
        if not self.beside:
            return y
        return with_sum_and_activation(y, args[self.beside], args["activation"])

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

    def tap_rows(self, dim: int, device: torch.device) -> Tensor:
        """Returns :attr:`taps` of a dim as rows of the window, (taps, rows)."""
        taps = self.taps[dim]

        def make() -> Tensor:
            return torch.tensor([[row for row, _ in tap] for tap in taps], device=device)

        return self.keep(("rows", dim, device), make)

    def keep(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Returns what is made once for a key; a compiler makes it again, as a constant."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self.kept:
            self.kept[key] = make()
        tensor: Tensor = self.kept[key]
        return tensor


def window_of(
    node: Node,
    context: Context,
    exchange: Exchange | None = None,
    *,
    whole: bool = False,
    overwrites: bool = False,
) -> Window:
    """Returns the window of a node on this rank.

    ``whole``: the rank computes all of the value, as from a whole input. ``overwrites``: its value
    may be written over the one beside the window.
    """
    graph, source, entry = context.plan.graph, node.inputs[0], facts_of(node.kind)
    axes, facts, plan = window_axes_of(node, graph), entry.window, context.plan
    assert axes is not None
    assert facts is not None
    assert node.shape is not None
    # The pixels that it makes, and those that it holds of its input.
    out = _all_of(axes[0].size_out, axes[1].size_out) if whole else context.extent(node.name)
    held = _all_of(axes[0].size_in, axes[1].size_in) if whole else context.extent(source)
    shape = (*node.shape[:2], out[1] - out[0], out[3] - out[2])
    # A padding "same" may be uneven, and torch's kernels pad both sides by one number.
    uneven = any(axis.dilation * (axis.kernel - 1) % 2 for axis in axes)
    padded = facts.pads and not (node.args["padding"] == "same" and uneven)
    # In a dim that is not cut, torch's kernel pads by itself, which saves a copy.
    native = [padded and (whole or parts == 1) for parts in context.stage.tiles]
    rect = need_of(axes, out)
    turns = axes[0].kind == CIRCULAR, axes[1].kind == CIRCULAR
    if facts.ring is not None and not is_empty(out):
        dims = zip(axes, native, (out[:2], out[2:]), strict=True)
        rows, cols = ((0, a.size_in) if own else a.reach(made) for a, own, made in dims)
        rect = rows + cols
    if any(turns) and not is_empty(rect):
        rows = axes[0].reach(out[:2]) if turns[0] else rect[:2]
        rect = rows + (axes[1].reach(out[2:]) if turns[1] else rect[2:])
    is_local = exchange is None and not is_empty(rect) and inside(rect, held)
    if is_local and facts.strips and padded:
        rect = _without_crop(rect, held, axes, native)
    strips = None
    if facts.strips and padded and not (is_local or 0 in shape or is_empty(rect)):
        overlap = plan.halo_overlap
        if overlap == "auto" and {*MEMORY} & {*backends_of_plan(plan)}:
            overlap = "off"  # pixels in shared memory arrive as soon as they are sent
        strips = strips_of(axes, held, out, overlap)
    return Window(
        imported(facts.kernel),
        axes,
        held,
        rect,
        out,
        shape,
        [axis.padding if own else 0 for axis, own in zip(axes, native, strict=True)],
        facts.ring,
        turns,
        is_local,
        bool(entry.multiplies),
        entry.residual_arg,
        node.args.get(entry.residual_arg) is not None,
        overwrites,
        strips,
    )


def _without_crop(rect: Rect, held: Rect, axes: Axes, native: list[bool]) -> Rect:
    # A convolution of stride 2 may end one row before the tile. Without that row the window would
    # be a crop, whose gradient is a copy of the whole tile.
    edges = list(rect)
    for end, axis, own in zip((1, 3), axes, native, strict=True):
        if not own and held[end] - edges[end] < axis.stride:
            edges[end] = held[end]
    return edges[0], edges[1], edges[2], edges[3]


def _all_of(rows: int, columns: int) -> Rect:
    return 0, rows, 0, columns


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


def max_pool_by_rows(
    x: Tensor, size: list[int], stride: list[int], padding: list[int], dilation: list[int],
    *, ceil_mode: bool,
) -> Tensor:  # fmt: skip
    """Returns the largest number of each window of (n, C, H, W), without a gradient.

    Each argument holds rows and columns. Around the image numbers are the least of their type. One
    dim follows the other, in whole rows of channels: 3 + 3 comparisons for a kernel of 3x3, and any
    type. torch's own kernel also finds where each maximum lies, for gradients: it takes up to 3.5
    times as long for maps in channels-last order, and no large maps of 8 bits. The result has
    memory of its own: the map may be overwritten while it is still read.
    """
    for dim, k, s, p, d in zip((2, 3), size, stride, padding, dilation, strict=True):
        length, reach = x.shape[dim] + 2 * p, d * (k - 1) + 1
        count = -(-(length - reach) // s) + 1 if ceil_mode else (length - reach) // s + 1
        if (count - 1) * s >= x.shape[dim] + p:  # a window that begins behind the image is none
            count -= 1
        x = _largest(x, dim, count, [tap * d - p for tap in range(k)], s)
    return x


def _largest(x: Tensor, dim: int, count: int, taps: list[int], step: int) -> Tensor:
    # The maxima of rows ``tap + step * o`` for each of ``count`` outputs o. No border is copied:
    #
    #     kernel 3, stride 2, padding 1     tap  0    rows  0 2 4 6    for all outputs
    #                                       tap  1          1 3 5 7    for all
    #                                       tap -1            1 3 5    from output 1 on
    whole, parts = [], []
    for tap in taps:
        first, end = max(0, -(tap // step)), min(count, -(-(x.shape[dim] - tap) // step))
        if first < end:
            rows = _every(x, dim, first * step + tap, end - first, step)
            everywhere = (first, end) == (0, count)
            whole.append(rows) if everywhere else parts.append((first, rows))
    if not whole:
        shape = [count if one == dim else size for one, size in enumerate(x.shape)]
        least = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        most = torch.full(shape, least, dtype=x.dtype, device=x.device)
        most = most.contiguous(memory_format=torch.channels_last)
    elif len(whole) == 1:
        most = whole[0].clone(memory_format=torch.channels_last)
    else:
        most = torch.maximum(*whole[:2])
    for rows in whole[2:]:
        torch.maximum(most, rows, out=most)
    for first, rows in parts:
        part = most.narrow(dim, first, rows.shape[dim])
        torch.maximum(part, rows, out=part)
    return most


def _every(x: Tensor, dim: int, first: int, count: int, step: int) -> Tensor:
    rows = x.narrow(dim, first, (count - 1) * step + 1)
    return rows[:, :, ::step] if dim == 2 else rows[..., ::step]


def pool_divisors(w: Window, args: dict[str, Any], like: Tensor) -> Tensor | float:
    """Returns by which each sum of an average pool is divided, (rows, columns)."""
    if args["divisor_override"]:
        scale: float = args["divisor_override"]
        return scale

    def make() -> Tensor:
        divisors = []
        for axis, out in zip(w.axes, (w.out[:2], w.out[2:]), strict=True):
            lows = [index * axis.stride - axis.padding for index in range(*out)]
            spans = [(low, min(low + axis.kernel, axis.size_in + axis.padding)) for low in lows]
            if not args["count_include_pad"]:
                spans = [(max(low, 0), min(high, axis.size_in)) for low, high in spans]
            divisors.append(torch.tensor([high - low for low, high in spans], dtype=like.dtype))
        return (divisors[0].view(-1, 1) * divisors[1]).to(like.device)

    return w.keep(("divisors", like.dtype, like.device), make)


def resampled(w: Window, x: Tensor) -> Tensor:
    """Returns rows and columns mixed, in single precision or better."""
    wide = x if x.dtype == torch.float64 else x.float()
    for dim, axis in enumerate(w.axes, start=2):
        if axis.kind not in RESAMPLINGS:  # roll along the other dim
            continue
        places = w.tap_rows(dim, x.device)
        if len(places) == 1:  # a copy of rows
            wide = wide.index_select(dim, places[0])
            continue
        shape = [-1 if other == dim else 1 for other in range(4)]
        parts = _weights(w, dim, wide)
        rows = [wide.index_select(dim, row) for row in places]
        mixed = rows[0] * parts[0].view(shape)
        for row, part_of in zip(rows[1:], parts[1:], strict=True):
            weight = part_of.view(shape)
            # Of 8-bit integers every rank makes the same: no addition may be fused here alone.
            exact = x.dtype == torch.uint8
            mixed = mixed + row * weight if exact else torch.addcmul(mixed, row, weight)
        wide = mixed
    return wide


def _weights(w: Window, dim: int, like: Tensor) -> Tensor:
    # Of the taps of a dim, (taps, rows).
    def make() -> Tensor:
        weights = [[weight for _, weight in tap] for tap in w.taps[dim]]
        return torch.tensor(weights, dtype=torch.float64).to(like)

    return w.keep(("weights", dim, like.dtype, like.device), make)
