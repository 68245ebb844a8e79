"""Convolves a tile while its halo travels, without copying the tile.

Forward, the tile is convolved at once with zeros in place of the missing pixels of other tiles.
When these have arrived, the outputs that they reach are computed again from thin windows.

    input                                        output
    a a a a a a a a   a  missing above           B B B B B B   B  borders: computed again
    l # # # # # # r   b  missing below           B i i i i B      from thin windows
    l # # # # # # r   l, r  left and right       B i i i i B   i  inner: no missing pixel
    b b b b b b b b   #  main pixels             B B B B B B      reaches them

Backward, a convolution is linear, so the gradient of the missing pixels is computed first, band by
band (a, b with the corners, l, r), and travels to their owners while the gradients of the main
pixels and of the weight are computed. Each band adds its own part to the gradient of the weight.

    output with zeros  y = conv(main) + bias
    whole output       y + conv(a) + conv(b) + conv(l) + conv(r), each with the taps that reach it

:func:`strips_of` divides each dim alone. For a kernel of 3 and stride 1:

    pixels of the image   . | # # # # # # | .     #  main pixels, .  missing: low edge, high edge
    convolved at once     0 | # # # # # # | 0     0  zeros in place of the missing pixels
    outputs                 | B i i i i B |       B  border, i  inner
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.parallel.halo import Borrowed, Piece, add_pieces, new_part, part, paste
from hires.parallel.torch_faults import convolve, convolve_backward
from hires.plan.graph import Rect
from hires.plan.halos import BORDER_SHARE
from hires.plan.operators.windows import pair
from hires.plan.tiling import Axes, Axis, Interval, intersect, is_empty

Compute = Callable[[Tensor, list[int], Rect], Tensor]


class Strip(NamedTuple):
    """A convolution with some taps of the kernel, from a thin window to some outputs."""

    out: Rect
    window: Rect
    pixels: Rect  # of its window that count; the others are zero
    taps: Rect  # rows and columns of the kernel


class Strips(NamedTuple):
    """The division of one tile's convolution; rectangles are in pixels of the whole map."""

    held: Rect
    main: Rect  # the part of the held pixels that is convolved at once
    padding: list[int]  # zeros around it
    out: Rect
    borders: list[Strip]  # forward: the outputs that missing pixels reach
    bands: list[Strip]  # backward: the missing pixels, each in one band


def strips_of(axes: Axes, held: Rect, out: Rect, overlap: str) -> Strips | None:
    """Returns the division of a tile's convolution, or None if it is computed as a whole.

    The tile holds ``held`` of the input and makes ``out``, not empty, of the output. ``overlap`` is
    ``off`` (never), ``on`` (where possible) or ``auto`` (where it also saves time).
    """
    if overlap == "off" or is_empty(held):
        return None
    rows = _divide(axes[0], (held[0], held[1]), (out[0], out[1]))
    cols = _divide(axes[1], (held[2], held[3]), (out[2], out[3]))
    if rows is None or cols is None:
        return None
    # Forward: the outputs that missing pixels reach are a frame of up to four rectangles.
    frame = [edge.out + out[2:] for edge in (rows.low, rows.high)]
    frame += [rows.inner + edge.out for edge in (cols.low, cols.high)]
    taps = (0, axes[0].kernel, 0, axes[1].kernel)
    if sum(map(_area, frame)) > (BORDER_SHARE if overlap == "auto" else 1) * _area(out):
        return None
    windows = [(to, _reach(axes, to, taps)) for to in frame if not is_empty(to)]
    borders = [Strip(to, window, window, taps) for to, window in windows]
    # Backward: above and below with the corners, left and right. A missing pixel is in one band.
    all_rows, all_cols = ((0, axis.kernel) for axis in axes)
    wide = (cols.low.pixels[0], cols.high.pixels[1])
    bands = [
        (edge.out + out[2:], edge.pixels + wide, edge.taps + all_cols)
        for edge in (rows.low, rows.high)
    ] + [
        (out[:2] + edge.out, rows.main + edge.pixels, all_rows + edge.taps)
        for edge in (cols.low, cols.high)
    ]
    strips = [
        Strip(to, _reach(axes, to, taps), pixels, taps)
        for to, pixels, taps in bands
        if not (is_empty(to) or is_empty(pixels) or is_empty(taps))
    ]
    main, padding = rows.main + cols.main, [rows.padding, cols.padding]
    return Strips(held, main, padding, out, borders, strips)


def by_strips(
    x: Tensor, borrowed: Borrowed | None, strips: Strips, compute: Compute, fill: float = 0.0
) -> Tensor:
    """Returns what ``compute`` makes of the held (n, C, h, w) and the borrowed pixels, if any.

    ``compute(window, padding, out)`` returns the outputs in a rectangle from a window, with so many
    rows and columns of ``fill`` around it, as outside the image. There is no gradient.
    """
    y = compute(part(x, strips.held, strips.main), strips.padding, strips.out)
    pieces = borrowed.pieces() if borrowed is not None else []
    for strip in strips.borders:
        window = _window(strip, [(strips.held, x), *pieces], fill)
        part(y, strips.out, strip.out).copy_(compute(window, [0, 0], strip.out))
    return y


def strip_convolution(
    x: Tensor, borrowed: Borrowed | None, strips: Strips, args: dict[str, Any]
) -> Tensor:
    """Returns a tile's convolution from the held (n, C, h, w) and the borrowed pixels, if any."""
    how = pair(args["stride"]), pair(args["dilation"]), args["groups"]
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
        how: tuple[list[int], list[int], int],
    ) -> Tensor:
        narrow = weight.to(x.dtype)
        offset = None if bias is None else bias.to(x.dtype)
        stride, dilation, groups = how

        def compute(window: Tensor, padding: list[int], out: Rect) -> Tensor:
            return convolve(window, narrow, offset, stride, padding, dilation, groups)

        y = by_strips(x, borrowed, strips, compute)
        ctx.save_for_backward(x, narrow)
        ctx.borrowed, ctx.strips, ctx.how = borrowed, strips, how
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        strips: Strips = ctx.strips
        needs = [*ctx.needs_input_grad[:3]]
        arriving, local = None, []
        if needs[0]:
            local = _gradients_of_bands(ctx, grad, x, weight)
            arriving = ctx.borrowed.reduce_halo_gradients() if ctx.borrowed is not None else None
        operands = grad, part(x, strips.held, strips.main), weight
        grads = convolve_backward(*operands, strips.padding, ctx.how, needs)
        grad_x, grad_weight, grad_bias = grads
        if needs[1]:
            grad_weight = grad_weight.to(ctx.weight_dtype)
            pieces = ctx.borrowed.pieces() if ctx.borrowed is not None else []
            for strip in strips.bands:  # the part of the missing pixels
                window = _window(strip, [(strips.held, x), *pieces])
                thin = part(grad, strips.out, strip.out), window, _tapped(weight, strip)
                _, added, _ = convolve_backward(*thin, [0, 0], ctx.how, [False, True, False])
                _tapped(grad_weight, strip).add_(added)
        if grad_x is not None:
            if strips.main != strips.held:
                grad_main, grad_x = grad_x, new_part(x, strips.held).zero_()
                part(grad_x, strips.held, strips.main).copy_(grad_main)
            for rect, tensor in local:
                part(grad_x, strips.held, rect).add_(tensor)
            add_pieces(grad_x, strips.held, arriving)
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _gradients_of_bands(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> list[Piece]:
    # Adds the gradients of borrowed pixels to their exchange; returns those of held pixels, which a
    # band may include: the main pixels end where an even padding fits.
    strips: Strips = ctx.strips
    local = []
    for strip in strips.bands:
        # The gradient of the input reads of the input only its shape.
        blank = new_part(x, strip.window)
        operands = part(grad, strips.out, strip.out), blank, _tapped(weight, strip)
        grad_x, _, _ = convolve_backward(*operands, [0, 0], ctx.how, [True, False, False])
        inner = intersect(strip.window, strip.pixels)
        if ctx.borrowed is not None:
            ctx.borrowed.add_gradient(strip.window, grad_x, inner)
        held = intersect(inner, strips.held)
        if not is_empty(held):
            local.append((held, part(grad_x, strip.window, held)))
    return local


def _window(strip: Strip, pieces: list[Piece], fill: float = 0.0) -> Tensor:
    # Pixels outside ``strip.pixels`` count in another band, or lie off the image.
    window = new_part(pieces[0][1], strip.window).fill_(fill)
    paste(window, strip.window, pieces, intersect(strip.pixels, strip.window))
    return window


def _tapped(weight: Tensor, strip: Strip) -> Tensor:
    return part(weight, (0, weight.shape[2], 0, weight.shape[3]), strip.taps)


class _Edge(NamedTuple):  # the missing pixels at one end of one dim
    pixels: Interval
    out: Interval
    taps: Interval


class _Division(
    NamedTuple
):  # one dim of a tile:  low | main pixels, padded with zeros on both sides | high
    main: Interval
    padding: int
    low: _Edge
    high: _Edge
    inner: Interval  # the outputs that no missing pixel reaches


def _divide(axis: Axis, held: Interval, out: Interval) -> _Division | None:
    fitted = _fit(axis, held, out)
    if fitted is None:
        return None
    main, padding = fitted
    # Output row o reads the rows o*stride - padding + dilation*tap for each tap of the kernel, so
    # rows before main[0] reach the outputs a to until, through the taps 0 to before; rows from
    # main[1] on reach the outputs since to b, through the taps after to kernel.
    (low, high), (a, b) = axis.need(out), out
    stride, extent = axis.stride, axis.dilation * (axis.kernel - 1)
    first, last = a * stride - axis.padding, (b - 1) * stride - axis.padding
    until = _ceil_between(main[0] + axis.padding, stride, a, b)
    since = _ceil_between(main[1] + axis.padding - extent, stride, a, b)
    before = _ceil_between(main[0] - first, axis.dilation, 0, axis.kernel)
    after = _ceil_between(main[1] - last, axis.dilation, 0, axis.kernel)
    until = until if low < main[0] else a
    since = since if main[1] < high else b
    before_main = _Edge((low, main[0]), (a, until), (0, before))
    behind_main = _Edge((main[1], high), (since, b), (after, axis.kernel))
    inner = (until, since)
    return _Division(main, padding, before_main, behind_main, inner) if until < since else None


def _fit(axis: Axis, held: Interval, out: Interval) -> tuple[Interval, int] | None:
    # The longest part of the held rows, and its padding, that makes just the wanted rows. torch
    # pads both sides by one number, and the first window must begin where that of the first wanted
    # row does. As few rows as possible are dropped at both ends until such a padding exists:
    #
    #     stride 2, kernel 3     held  # # # # # #      wanted rows read  [0 # #] [# # #] [# # #]
    #                            main  # # # # #        padding 1 above and below
    extent = axis.dilation * (axis.kernel - 1)
    start = out[0] * axis.stride - axis.padding
    first = max(held[0], start)
    slack = extent + axis.stride
    for dropped in range(2 * slack + 1):
        for above in range(max(0, dropped - slack), min(dropped, slack) + 1):
            main = first + above, held[1] - (dropped - above)
            padding = main[0] - start
            free = main[1] - main[0] + 2 * padding - extent - 1
            if main[1] > main[0] and free >= 0 and free // axis.stride + 1 == out[1] - out[0]:
                return main, padding
    return None


def _reach(axes: Axes, out: Rect, taps: Rect) -> Rect:
    # The pixels under some taps for some outputs, also beyond the image.
    def reach(axis: Axis, out: Interval, taps: Interval) -> Interval:
        padding = axis.padding - axis.dilation * taps[0]
        return replace(axis, kernel=taps[1] - taps[0], padding=padding).reach(out)

    return reach(axes[0], out[:2], taps[:2]) + reach(axes[1], out[2:], taps[2:])


def _ceil_between(number: int, step: int, low: int, high: int) -> int:
    return min(max(math.ceil(number / step), low), high)


def _area(rect: Rect) -> int:
    return max(0, rect[1] - rect[0]) * max(0, rect[3] - rect[2])
