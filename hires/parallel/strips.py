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
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.parallel.convolution import convolve, convolve_backward
from hires.parallel.halo import Borrowed, Piece, add_pieces, crop, new_map, part
from hires.parallel.strip_division import Strip, Strips
from hires.plan.operators.operator_table import pair
from hires.plan.tiling import intersect, is_empty


def strip_convolution(
    x: Tensor, borrowed: Borrowed | None, strips: Strips, args: dict[str, Any]
) -> Tensor:
    """Returns a tile's convolution.

    Args:
        x: the held pixels, (n, C, h, w); the arithmetic is in their type.
        borrowed: pixels of other tiles, or None if the held ones reach as far as is needed.
        strips: how the work is divided.
        args: ``weight``, ``bias``, ``stride``, ``dilation`` and ``groups`` of the convolution.

    Raises:
        CommError: a neighbour died or did not answer within ``comm.timeout_s``.
    """
    how = pair(args["stride"]), pair(args["dilation"]), args["groups"]
    apply = StripConvolution.apply
    return apply(x, args["weight"], args["bias"], borrowed, strips, how)  # type: ignore[no-any-return,no-untyped-call]


class StripConvolution(torch.autograd.Function):
    """Held pixels -> the tile's convolution; the halo and its gradients travel meanwhile."""

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
        """(n, C, h, w) -> (n, K, out rows, out cols)."""
        narrow = weight.to(x.dtype)
        offset = None if bias is None else bias.to(x.dtype)
        stride, dilation, groups = how
        main = crop(x, strips.held, strips.main)
        y = convolve(main, narrow, offset, stride, strips.padding, dilation, groups)
        pieces = borrowed.pieces() if borrowed is not None else []
        for strip in strips.borders:
            window = _window(strip, [(strips.held, x), *pieces])
            again = convolve(window, narrow, offset, stride, 0, dilation, groups)
            part(y, strips.out, strip.out).copy_(again)
        ctx.save_for_backward(x, narrow)
        ctx.borrowed, ctx.strips, ctx.how = borrowed, strips, how
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """Gradients of the held pixels, weight and bias."""
        x, weight = ctx.saved_tensors
        strips: Strips = ctx.strips
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        arriving, local = None, []
        if need_x:
            local = _gradients_of_bands(ctx, grad, x, weight)
            arriving = ctx.borrowed.reduce_halo_gradients() if ctx.borrowed is not None else None
        grad_x, grad_weight, grad_bias = convolve_backward(
            grad,
            crop(x, strips.held, strips.main),
            weight,
            strips.padding,
            ctx.how,
            [need_x, need_weight, need_bias],
        )
        if need_weight:
            grad_weight = grad_weight.to(ctx.weight_dtype)
            _add_bands(ctx, (grad, x, weight), grad_weight)
        if grad_x is not None:
            if strips.main != strips.held:
                grad_main, grad_x = grad_x, new_map(x, tuple(x.shape)).zero_()
                part(grad_x, strips.held, strips.main).copy_(grad_main)
            for rect, tensor in local:
                part(grad_x, strips.held, rect).add_(tensor)
            add_pieces(grad_x, strips.held, arriving)
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _gradients_of_bands(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> list[Piece]:
    """Hands the gradients of borrowed pixels to their exchange; returns those of held pixels.

    The main pixels end where an even padding fits, so a band may include pixels that are held.
    """
    strips: Strips = ctx.strips
    local = []
    for strip in strips.bands:
        r0, r1, c0, c1 = strip.window
        # The gradient of the input reads of the input only its shape.
        blank = new_map(x, (x.shape[0], x.shape[1], r1 - r0, c1 - c0))
        operands = part(grad, strips.out, strip.out), blank, _tapped(weight, strip)
        grad_x, _, _ = convolve_backward(*operands, [0, 0], ctx.how, [True, False, False])
        assert grad_x is not None
        inner = intersect(strip.window, strip.pixels)
        if ctx.borrowed is not None:
            ctx.borrowed.add_gradient(strip.window, grad_x, inner)
        held = intersect(inner, strips.held)
        if not is_empty(held):
            local.append((held, part(grad_x, strip.window, held)))
    return local


def _add_bands(ctx: Any, operands: tuple[Tensor, Tensor, Tensor], total: Tensor) -> None:
    """Adds the part of the missing pixels to the gradient of the weight."""
    grad, x, weight = operands
    strips: Strips = ctx.strips
    pieces = ctx.borrowed.pieces() if ctx.borrowed is not None else []
    for strip in strips.bands:
        window = _window(strip, [(strips.held, x), *pieces])
        thin = part(grad, strips.out, strip.out), window, _tapped(weight, strip)
        _, grad_weight, _ = convolve_backward(*thin, [0, 0], ctx.how, [False, True, False])
        _tapped(total, strip).add_(grad_weight)


def _window(strip: Strip, pieces: list[Piece]) -> Tensor:
    """Returns the thin window of a strip, zero where it does not count."""
    like = pieces[0][1]
    r0, r1, c0, c1 = strip.window
    window = new_map(like, (like.shape[0], like.shape[1], r1 - r0, c1 - c0)).zero_()
    for rect, tensor in pieces:
        common = intersect(intersect(rect, strip.pixels), strip.window)
        if not is_empty(common):
            part(window, strip.window, common).copy_(part(tensor, rect, common))
    return window


def _tapped(weight: Tensor, strip: Strip) -> Tensor:
    """Returns the taps of a kernel that a strip uses, (K, C / groups, rows, cols)."""
    return part(weight, (0, weight.shape[2], 0, weight.shape[3]), strip.taps)
