"""Computes the operators of quantised networks, on a tile as on all of the image.

A rank that computes a whole value goes the same way as a tile, with a window that is all of the
image: so every number has the same bits on every grid. Sums of products are exact
(:mod:`hires.quant.int8_kernels`); all other arithmetic is of single numbers, in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.context import Context
from hires.parallel.reductions import Reduced, declare
from hires.parallel.window import WINDOW_KERNELS, Window, pool_divisors, resampled
from hires.plan.graph import Node
from hires.plan.operators.windows import pair
from hires.plan.rules import reduced_dims
from hires.quant.int8_kernels import (
    Added,
    Geometry,
    Rescale,
    Rescaling,
    convolve_int8,
    multiply_add_int8,
    multiply_int8,
    nearest_numbers,
    pack_int8,
)
from hires.quant.row_scales import multiply_rows

Args = dict[str, Any]

Packer = Callable[[Window | None, list[int], Args], Tensor | None]
PACKERS: Registry[Packer] = Registry("packer")
"""Operator with a weight -> returns it in the order in which its kernel reads it for inputs of a
shape, and keeps it for the kernel; None: that reads the weight itself."""
NODE_KERNELS: Registry[Callable[[Node, Context], Callable[[Args], Tensor]]] = Registry("kernel")
"""Operator of hires' own -> makes the function from a node's arguments by name to its value."""


@NODE_KERNELS.register("quantize")
def _quantize(node: Node, context: Context) -> Callable[[Args], Tensor]:
    factor = torch.tensor(1.0 / node.args["scale"], dtype=torch.float32).item()

    def run(args: Args) -> Tensor:
        return nearest_numbers(args["input"].float() * factor, args["zero_point"])

    return run


@NODE_KERNELS.register("dequantize")
def _dequantize(node: Node, context: Context) -> Callable[[Args], Tensor]:
    dtype = getattr(torch, node.dtype or "float32")

    def run(args: Args) -> Tensor:
        real: Tensor = args["input"].to(dtype)
        return real.sub_(args["zero_point"]).mul_(args["scale"])

    return run


@NODE_KERNELS.register("q_requantize")
def _requantize(node: Node, context: Context) -> Callable[[Args], Tensor]:
    if node.args["factor"] == 1 and node.args["offset"] == 0:
        return lambda args: args["input"].clamp(args["low"], args["high"])
    rescaling = _rescaling(node, context)
    return lambda args: rescaling(args["input"], args["low"], args["high"])


@NODE_KERNELS.register("q_add")
def _add(node: Node, context: Context) -> Callable[[Args], Tensor]:
    rescaling = _rescaling(node, context)

    def run(args: Args) -> Tensor:
        added = Added(args["other"], args["other_factor"])
        return rescaling(args["input"], args["low"], args["high"], added)

    return run


@NODE_KERNELS.register("q_mul")
def _product(node: Node, context: Context) -> Callable[[Args], Tensor]:
    def run(args: Args) -> Tensor:
        # y = x * factor + offset for each channel, or each number, of the other operand.
        factor = args["other"].float().sub_(args["other_zero_point"]).mul_(args["factor"])
        offset = (factor * -args["zero_point"]).add_(args["offset"])
        return multiply_add_int8(args["input"], factor, offset)

    return run


@NODE_KERNELS.register("q_table")
def _looked_up(node: Node, context: Context) -> Callable[[Args], Tensor]:
    table = torch.tensor(node.args["table"], dtype=torch.uint8, device=context.device)

    def run(args: Args) -> Tensor:
        x = args["input"]
        if x.dim() == 4:  # in the order in which its numbers lie
            rows = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
            return _looked_up_in(table, rows).permute(0, 3, 1, 2)
        return _looked_up_in(table, x)

    return run


def _looked_up_in(table: Tensor, x: Tensor) -> Tensor:
    return table.index_select(0, x.reshape(-1).int()).view(x.shape)


@NODE_KERNELS.register("q_linear")
def _linear(node: Node, context: Context) -> Callable[[Args], Tensor]:
    return lambda args: multiply_int8(args["input"], args["weight"], _rescale(args))


@PACKERS.register("q_linear")
@PACKERS.register("q_dynamic_linear")
def _pack_linear(w: Window | None, shape: list[int], args: Args) -> Tensor | None:
    column = [1, shape[-1], math.prod(shape[:-1]), 1]
    return pack_int8(column, args["weight"], Geometry(), args["multiplier"])


@NODE_KERNELS.register("q_dynamic_linear")
def _dynamic_linear(node: Node, context: Context) -> Callable[[Args], Tensor]:
    names = "weight", "multiplier", "offset", "bias"
    return lambda args: multiply_rows(args["input"].float(), *(args[name] for name in names))


@WINDOW_KERNELS.register("q_conv2d")
def _convolution(w: Window, x: Tensor, args: Args) -> Tensor:
    how = _geometry(w, args)
    other, factor = args["other"], args["other_factor"]
    added = None if other is None else Added(other, factor, w.overwrites)
    return convolve_int8(x, args["weight"], how, _rescale(args), args["zero_point"], added)


@PACKERS.register("q_conv2d")
def _pack_convolution(w: Window | None, shape: list[int], args: Args) -> Tensor | None:
    assert w is not None
    how, border = _geometry(w, args), args["zero_point"]
    return pack_int8(shape, args["weight"], how, args["multiplier"], border)


def _geometry(w: Window, args: Args) -> Geometry:
    return Geometry(pair(args["stride"]), w.padding, pair(args["dilation"]), args["groups"])


@WINDOW_KERNELS.register("q_conv_transpose2d")
def _transposed(w: Window, x: Tensor, args: Args) -> Tensor:
    # Output row o, counted from the first that any input reaches, is of phase o % stride. All of a
    # phase are a convolution of the input with every stride-th row of the kernel; the weight holds
    # the phases as channels (``hires.engine.quantized_tensors``).
    #
    #     kernel 4, stride 2     phase 0  o = 0 2 4 ..  taps 2 0  of input rows o/2 - 1, o/2
    #                            phase 1  o = 1 3 5 ..  taps 3 1
    pads, crops = phase_window(w, args["weight"])
    x = F.pad(x, (*pads[1], *pads[0]), value=args["zero_point"])
    y = convolve_int8(x, args["weight"], Geometry(groups=args["groups"]), _rescale(args))
    (rows, cols), (n, _, height, width) = (axis.stride for axis in w.axes), y.shape
    phases = y.view(n, -1, rows, cols, height, width).permute(0, 1, 4, 2, 5, 3)
    whole = phases.reshape(n, -1, height * rows, width * cols)
    return whole[:, :, crops[0], crops[1]].contiguous(memory_format=torch.channels_last)


@PACKERS.register("q_conv_transpose2d")
def _pack_transposed(w: Window | None, shape: list[int], args: Args) -> Tensor | None:
    assert w is not None
    (rows, columns), _ = phase_window(w, args["weight"])
    shape = [*shape[:2], shape[2] + sum(rows), shape[3] + sum(columns)]
    return pack_int8(shape, args["weight"], Geometry(groups=args["groups"]), args["multiplier"])


def phase_window(w: Window, weight: Tensor) -> tuple[list[tuple[int, int]], list[slice]]:
    """Returns the pixels around the input that the phases read, and the outputs of the tile."""
    pads, crops = [], []
    for dim in (0, 1):
        axis, out = w.axes[dim], w.out[2 * dim : 2 * dim + 2]
        first, last = out[0] + axis.padding, out[1] - 1 + axis.padding
        taps = weight.shape[2 + dim]
        begin, end = first // axis.stride - (taps - 1), last // axis.stride + 1
        pads.append((w.rect[2 * dim] - begin, end - w.rect[2 * dim + 1]))
        start = first % axis.stride
        crops.append(slice(start, start + out[1] - out[0]))
    return pads, crops


@WINDOW_KERNELS.register("q_avg_pool2d")
def _avg_pool(w: Window, x: Tensor, args: Args) -> Tensor:
    size, stride = args["kernel_size"], args["stride"] or None
    real = x.float() - args["zero_point"]
    total = F.avg_pool2d(real, size, stride, w.padding, args["ceil_mode"], divisor_override=1)
    mean = total / pool_divisors(w, args, total)
    return nearest_numbers(mean * args["factor"], args["offset"], args["low"], args["high"])


@WINDOW_KERNELS.register("q_interpolate")
def _interpolate(w: Window, x: Tensor, args: Args) -> Tensor:
    mixed = resampled(w, x)
    return nearest_numbers(mixed * args["factor"], args["offset"], args["low"], args["high"])


# Sums of unsigned numbers need up to 36 bits, which travel as two fp32 numbers of 24 bits or fewer.
DIGITS = 12


def _digits(x: Tensor, r: Reduced) -> Tensor:
    total = x.sum(r.dims, r.keep, dtype=torch.int64)
    return torch.stack([total >> DIGITS, total & (2**DIGITS - 1)]).float()


def _mean(sent: Tensor, r: Reduced) -> Tensor:
    upper, lower = sent.double().sum(0)
    total = (upper * 2**DIGITS + lower).float()
    return nearest_numbers(
        total * r.args["factor"], r.args["offset"], r.args["low"], r.args["high"]
    )


declare("q_mean", _digits, _mean)


@NODE_KERNELS.register("q_mean")
def _whole_mean(node: Node, context: Context) -> Callable[[Args], Tensor]:
    shape = context.plan.graph.shape(node.inputs[0])
    dims, keep = sorted(reduced_dims(node, shape)), node.args["keepdim"]
    everything = Reduced(node.args, dims, keep, (0, 0, 0, 0), [], torch.ones(1), 1)
    return lambda args: _mean(_digits(args["input"], everything)[None], everything)


def _rescale(args: Args) -> Rescale:
    return Rescale(args["multiplier"], args["offset"], args["low"], args["high"], args["dtype"])


def _rescaling(node: Node, context: Context) -> Rescaling:
    shape = node.shape or []
    channels = shape[1] if len(shape) == 4 else shape[-1]
    return Rescaling(channels, node.args["factor"], node.args["offset"], context.device)
