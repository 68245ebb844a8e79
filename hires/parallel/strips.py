"""Convolves a tile while its halo travels.

Forward, the outputs that read held pixels alone are computed at once. When the missing pixels have
arrived, the others are computed from thin windows. For a kernel of 3 and stride 1:

    input                                        output
    a a a a a a a a   a, b  missing above, below  B B B B B B   B  borders: from thin windows
    l # # # # # # r   l, r  missing at the sides  B i i i i B   i  inner: from held pixels
    l # # # # # # r   #     held                  B i i i i B
    b b b b b b b b                               B B B B B B

Backward, the gradient of the window comes first, so that of the missing pixels travels to their
owners while the gradient of the weight is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.parallel.halo import (
    Borrowed,
    Frame,
    gathered_window,
    new_part,
    own_gradient,
    part,
    send_gradients,
)
from hires.parallel.torch_faults import convolve, convolve_backward
from hires.plan.graph import Rect
from hires.plan.halos import BORDER_SHARE
from hires.plan.operators.windows import pair
from hires.plan.tiling import Axes, Axis, Interval, area, inside, is_empty, need_of
from hires.quant.int8_kernels import Geometry

Compute = Callable[[Tensor, list[int], Rect], Tensor]


class Strips(NamedTuple):
    """The division of one tile's convolution; rectangles are in pixels of the whole map."""

    axes: Axes
    held: Rect
    out: Rect
    inner: Rect  # outputs of held pixels alone
    main: Rect  # what these read
    padding: list[int]  # zeros around it
    borders: list[Rect]  # the other outputs

    def frame(self, out: Rect, fill: float = 0.0) -> Frame:
        """Returns the window of some outputs, also beyond the image."""
        rows, cols = self.axes
        size = rows.size_in, cols.size_in
        return Frame(self.held, rows.reach(out[:2]) + cols.reach(out[2:]), size, fill)


def strips_of(axes: Axes, held: Rect, out: Rect, overlap: str) -> Strips | None:
    """Returns the division of a tile's convolution, or None if it is computed as a whole.

    The tile holds ``held`` of the input and makes ``out``, not empty, of the output. ``overlap`` is
    ``off`` (never), ``on`` (where possible) or ``auto`` (where it also saves time).
    """
    if overlap == "off" or is_empty(held):
        return None
    rows, above = _inner(axes[0], held[:2], out[:2])
    cols, left = _inner(axes[1], held[2:], out[2:])
    inner = rows + cols
    if is_empty(inner):
        return None
    frame = [(out[0], rows[0], *out[2:]), (rows[1], out[1], *out[2:])]
    frame += [(*rows, out[2], cols[0]), (*rows, cols[1], out[3])]
    borders = [rect for rect in frame if not is_empty(rect)]
    waits = sum(area(rect) for rect in borders if not inside(need_of(axes, rect), held))
    if overlap == "auto" and waits > BORDER_SHARE * area(out):
        return None
    reads = held[:2] if above else axes[0].reach(rows), held[2:] if left else axes[1].reach(cols)
    main = reads[0] + reads[1]
    return Strips(axes, held, out, inner, main, [above, left], borders)


def by_strips(
    x: Tensor, borrowed: Borrowed | None, strips: Strips, compute: Compute, fill: float = 0.0
) -> Tensor:
    """Returns what ``compute`` makes of the held (n, C, h, w) and the borrowed pixels, if any.

    ``compute(window, padding, out)`` returns the outputs in a rectangle from a window, with so many
    rows and columns of ``fill`` around it, as outside the image. There is no gradient.
    """
    inner = compute(part(x, strips.held, strips.main), strips.padding, strips.inner)
    y = new_part(inner, strips.out)
    part(y, strips.out, strips.inner).copy_(inner)
    if borrowed is not None:
        borrowed.pieces()  # a tile that only lends waits here, too
    for rect in strips.borders:
        window = gathered_window(x, borrowed, strips.frame(rect, fill))
        part(y, strips.out, rect).copy_(compute(window, [0, 0], rect))
    return y


def strip_convolution(
    x: Tensor, borrowed: Borrowed | None, strips: Strips, args: dict[str, Any]
) -> Tensor:
    """Returns a tile's convolution from the held (n, C, h, w) and the borrowed pixels, if any."""
    how = Geometry(pair(args["stride"]), [0, 0], pair(args["dilation"]), args["groups"])
    apply = _StripConvolution.apply
    return apply(x, args["weight"], args["bias"], borrowed, strips, how)  # type: ignore[no-any-return,no-untyped-call]


class _StripConvolution(torch.autograd.Function):
    # (n, C, h, w) of held pixels -> (n, K, out rows, out cols); the halo travels meanwhile.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        borrowed: Borrowed | None,
        strips: Strips,
        how: Geometry,
    ) -> Tensor:
        narrow = weight.to(x.dtype)
        offset = None if bias is None else bias.to(x.dtype)

        def compute(window: Tensor, padding: list[int], out: Rect) -> Tensor:
            return convolve(window, narrow, offset, how._replace(padding=padding))

        ctx.save_for_backward(x, narrow)
        ctx.borrowed, ctx.strips, ctx.how = borrowed, strips, how
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return by_strips(x, borrowed, strips, compute)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        frame = ctx.strips.frame(ctx.strips.out)
        of_x, *of_params = ctx.needs_input_grad[:3]
        window, arriving = gathered_window(x, ctx.borrowed, frame), None
        grad_window: Any = None
        if of_x:
            mask = [True, False, False]
            grad_window, *_ = convolve_backward(grad, window, weight, ctx.how, mask)
            arriving = send_gradients(grad_window, ctx.borrowed, frame)
        mask = [False, *of_params]
        _, grad_weight, grad_bias = convolve_backward(grad, window, weight, ctx.how, mask)
        grad_x = own_gradient(grad_window, arriving, frame, x.shape) if of_x else None
        return (
            grad_x,
            None if grad_weight is None else grad_weight.to(ctx.weight_dtype),
            None if grad_bias is None else grad_bias.to(ctx.bias_dtype),
            *(None, None, None),
        )


def _inner(axis: Axis, held: Interval, out: Interval) -> tuple[Interval, int]:
    # The outputs of held rows alone, and the zeros around these.
    if (held, out) == ((0, axis.size_in), (0, axis.size_out)):  # the dim is not cut
        return out, axis.padding
    extent = axis.dilation * (axis.kernel - 1)
    first = -(-(held[0] + axis.padding) // axis.stride)
    end = (held[1] - 1 - extent + axis.padding) // axis.stride + 1
    return (max(out[0], first), min(out[1], end)), 0
