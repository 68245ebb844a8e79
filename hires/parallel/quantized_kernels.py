"""Computes the operators of quantised networks, on a tile as on all of the image.

A rank that computes a whole value goes the same way as a tile, with a window that is all of the
image: so every element has the same bits on every grid. Sums of products are exact
(:mod:`hires.quant.int8_kernels`); all other arithmetic is elementwise, in one order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.image_kernels import Bind, Operator
from hires.parallel.reductions import Reduced, declare, reduction
from hires.parallel.window import Window, pool_divisors, resampled
from hires.plan.graph import Node
from hires.plan.operators.windows import pair
from hires.plan.rules import reduced_dims
from hires.quant.int8_kernels import (
    Added,
    Geometry,
    OnednnProduct,
    Rescale,
    Rescaling,
    adds_by_rows,
    convolve_int8,
    is_packed,
    multiply_add_int8,
    multiply_int8,
    nearest_numbers,
    product_of,
)
from hires.quant.row_scales import multiply_rows

Args = dict[str, Any]
BLOCK, WHOLE = 2**18, 2**20
"""Numbers of a map that are computed at once, and of one that is not taken apart."""


def quantize(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Rounds real numbers to 8 bits."""
    factor = torch.tensor(1.0 / node.args["scale"], dtype=torch.float32).item()

    def run(args: Args) -> Tensor:
        return nearest_numbers(args["input"].float() * factor, args["zero_point"])

    return run


def dequantize(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Returns the real numbers that integers stand for."""
    dtype = getattr(torch, node.dtype or "float32")

    def run(args: Args) -> Tensor:
        real: Tensor = args["input"].to(dtype)
        return real.sub_(args["zero_point"]).mul_(args["scale"])

    return run


def requantize(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Brings integers to another scale and zero point."""
    if node.args["factor"] == 1 and node.args["offset"] == 0:
        return lambda args: args["input"].clamp(args["low"], args["high"])
    rescaling = _rescaling(node, context)
    return lambda args: rescaling(args["input"], args["low"], args["high"])


def add(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Adds integers of two scales."""
    rescaling = _rescaling(node, context)

    def run(args: Args) -> Tensor:
        added = Added(args["other"], args["other_factor"])
        return rescaling(args["input"], args["low"], args["high"], added)

    return run


def multiply(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Multiplies integers by those of each channel or element."""

    def run(args: Args) -> Tensor:
        # y = x * factor + offset for each channel, or each element, of the other operand.
        factor = args["other"].float().sub_(args["other_zero_point"]).mul_(args["factor"])
        offset = (factor * -args["zero_point"]).add_(args["offset"])
        return multiply_add_int8(args["input"], factor, offset)

    return run


def looked_up(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Looks each integer up in a table."""
    table = torch.tensor(node.args["table"], dtype=torch.uint8, device=context.device)

    def run(args: Args) -> Tensor:
        x = args["input"]
        if x.dim() == 4:  # in the order of its memory
            rows = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
            return _looked_up_in(table, rows).permute(0, 3, 1, 2)
        return _looked_up_in(table, x)

    return run


def _looked_up_in(table: Tensor, x: Tensor) -> Tensor:
    return table.index_select(0, x.reshape(-1).int()).view(x.shape)


def linear(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Multiplies rows by a weight."""
    return lambda args: multiply_int8(args["input"], args["weight"], _rescale(args))


def packed_linear(kernel: Any, like: Tensor, args: Args) -> Tensor | None:
    """Returns the weight of a linear layer as oneDNN reads it."""
    shape = like.shape
    column, weight = [1, shape[-1], math.prod(shape[:-1]), 1], args["weight"]
    if not is_packed(column, weight, args["largest"]):
        return None
    return product_of(weight, column, Geometry()).packed


def dynamic_linear(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Multiplies real rows, each rounded to 8 bits by its own scale."""
    names = "weight", "multiplier", "offset", "bias", "largest"
    return lambda args: multiply_rows(args["input"].float(), *(args[name] for name in names))


def convolution(w: Window, x: Tensor, args: Args) -> Tensor:
    """Computes a convolution, and what is added to it."""
    other, factor = args["other"], args["other_factor"]
    added = None if other is None else Added(other, factor, w.overwrites)
    product = w.kept.get("product")
    if product is not None and product.shape == x.shape:
        return product(x, _rescale(args), added)  # type: ignore[no-any-return]
    how = _geometry(w, args)
    return convolve_int8(x, args["weight"], how, _rescale(args), args["zero_point"], added)


def packed_convolution(w: Window, like: Tensor, args: Args) -> Tensor | None:
    """Returns the weight of a convolution as oneDNN reads it."""
    how, weight, shape = _geometry(w, args), args["weight"], [*like.shape]
    if not is_packed(shape, weight, args["largest"]):
        return None
    # By rows a sum is added in place: torch copies what its convolution adds to.
    by_rows = w.adds and adds_by_rows(weight, how)
    product = product_of(weight, shape, how, args["zero_point"], by_rows=by_rows)
    w.kept["product"] = product
    return product.packed


def _geometry(w: Window, args: Args) -> Geometry:
    return Geometry(pair(args["stride"]), w.padding, pair(args["dilation"]), args["groups"])


def conv_transpose(w: Window, x: Tensor, args: Args) -> Tensor:
    """Computes a transposed convolution as one convolution of all its phases."""
    # Output row o, counted from the first that any input reaches, is of phase o % stride. All of a
    # phase are a convolution of the input with every stride-th row of the kernel; the weight holds
    # the phases as channels (``hires.engine.derived_tensors``).
    #
    #     kernel 4, stride 2     phase 0  o = 0 2 4 ..  taps 2 0  of input rows o/2 - 1, o/2
    #                            phase 1  o = 1 3 5 ..  taps 3 1
    pads, crops = phase_window(w, args["weight"])
    if any(map(any, pads)):
        x = F.pad(x, (*pads[1], *pads[0]), value=args["zero_point"])
    product, by_phase = w.kept.get("phases", (None, {}))
    if product is not None and product.shape == x.shape:
        y = product(x, _rescale({**args, **by_phase}), None)
    else:
        y = convolve_int8(x, args["weight"], Geometry(groups=args["groups"]), _rescale(args))
        y = _phase_major(y.transpose(0, 1), w, args["groups"]).transpose(0, 1)
    whole = _interleaved(y, w, args["groups"])[:, :, crops[0], crops[1]]
    return whole.contiguous(memory_format=torch.channels_last)


def _phase_major(channels: Tensor, w: Window, groups: int) -> Tensor:
    # (groups x outputs x phases, ...) -> (groups x phases x outputs, ...): in channels-last order
    # the outputs of a phase then lie side by side, and are moved to their pixel as one block.
    rows, cols = (axis.stride for axis in w.axes)
    apart = channels.reshape(groups, -1, rows * cols, *channels.shape[1:])
    return apart.transpose(1, 2).reshape(channels.shape)


def _interleaved(y: Tensor, w: Window, groups: int) -> Tensor:
    # (n, groups x phases x outputs, H, W) -> (n, groups x outputs, H rows, W cols)
    (rows, cols), (n, _, height, width) = (axis.stride for axis in w.axes), y.shape
    pixels = y.permute(0, 2, 3, 1).reshape(n, height, width, groups, rows, cols, -1)
    moved = pixels.permute(0, 1, 4, 2, 5, 3, 6).reshape(n, height * rows, width * cols, -1)
    return moved.permute(0, 3, 1, 2)


def packed_transposed(w: Window, like: Tensor, args: Args) -> Tensor | None:
    """Returns the weight of a transposed convolution as oneDNN reads it."""
    weight, groups = args["weight"], args["groups"]
    (rows, columns), _ = phase_window(w, weight)
    shape = [*like.shape[:2], like.shape[2] + sum(rows), like.shape[3] + sum(columns)]
    if not is_packed(shape, weight, args["largest"]):
        return None
    names = "weight", "multiplier", "offset"
    by_phase = {name: _phase_major(args[name].detach(), w, groups) for name in names}
    product = OnednnProduct(by_phase.pop("weight"), shape, Geometry(groups=groups), 0)
    w.kept["phases"] = product, by_phase
    return product.packed


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


def avg_pool(w: Window, x: Tensor, args: Args) -> Tensor:
    """Computes means, some rows of some images at a time."""
    size, step = pair(args["kernel_size"]), pair(args["stride"] or args["kernel_size"])
    rows, cols = w.out[1] - w.out[0], w.out[3] - w.out[2]
    (count, channels, height, width), (above, left) = x.shape, w.padding
    right = (cols - 1) * step[1] + size[1] - left - width
    divisors = pool_divisors(w, args, x.new_empty(0, dtype=torch.float32))
    shape = (count, channels, rows, cols)
    made = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    images, some = _block(x, rows, channels * max(width * step[0], cols))
    for first, row in itertools.product(range(0, count, images), range(0, rows, some)):
        end = min(row + some, rows)
        # Rows of x that these rows of the result read, some of them beyond its edges.
        top, bottom = row * step[0] - above, (end - 1) * step[0] + size[0] - above
        low, high = max(top, 0), min(bottom, height)
        real = x[first : first + images, :, low:high].float().sub_(args["zero_point"])
        pads = [left, right, low - top, bottom - high]
        real = F.pad(real, pads) if any(pads) else real  # it copies, even by zeros
        total = F.avg_pool2d(real, size, step, divisor_override=1)
        mean = total.div_(divisors[row:end] if isinstance(divisors, Tensor) else divisors)
        made[first : first + images, :, row:end] = nearest_numbers(
            mean.mul_(args["factor"]), args["offset"], args["low"], args["high"]
        )
    return made


def _block(x: Tensor, rows: int, row: int) -> tuple[int, int]:
    """Returns how many images, and rows of each, are computed at once: what a CPU's caches hold.

    ``row`` is the numbers of a row. Nine passes over a large map in memory take most of the time.
    """
    count = x.shape[0]
    if not x.is_cpu or count * rows * row <= WHOLE or torch.compiler.is_compiling():
        return count, rows
    return max(1, BLOCK // (rows * row)), min(rows, max(1, BLOCK // row))


def interpolate(w: Window, x: Tensor, args: Args) -> Tensor:
    """Mixes rows and columns."""
    mixed = resampled(w, x)
    return nearest_numbers(mixed * args["factor"], args["offset"], args["low"], args["high"])


# Sums of unsigned integers need up to 36 bits, which travel as two fp32 numbers of up to 24 bits;
# those of up to 256 x 256 pixels need no more than 24.
DIGITS = 12


def _digits(x: Tensor, r: Reduced) -> Tensor:
    most = 255 * math.prod(x.shape[dim] for dim in r.dims)
    wide = torch.int32 if most < 2**31 else torch.int64  # which takes four times as long
    total = x.sum(r.dims, r.keep, dtype=wide).long()
    if r.args["parts"] == 1:
        return total.float()
    return torch.stack([total >> DIGITS, total & (2**DIGITS - 1)]).float()


def _mean(sent: Tensor, r: Reduced) -> Tensor:
    total = sent.double().sum(0)
    if r.args["parts"] == 2:
        upper, lower = total
        total = upper * 2**DIGITS + lower
    total = total.float()
    return nearest_numbers(
        total * r.args["factor"], r.args["offset"], r.args["low"], r.args["high"]
    )


declare("q_mean", _digits, _mean)


def tiled_mean(node: Node, context: Context, bind: Bind) -> Operator:
    """Returns the callable of a mean of the image in tiles."""
    return reduction(node, context, bind)


def whole_mean(node: Node, context: Context) -> Callable[[Args], Tensor]:
    """Returns the mean of an image that a rank holds whole."""
    shape = context.plan.graph.shape(node.inputs[0])
    dims, keep = sorted(reduced_dims(node, shape)), node.args["keepdim"]
    everything = Reduced(node.args, dims, keep, (0, 0, 0, 0), [], torch.ones(1), 1)
    return lambda args: _mean(_digits(args["input"], everything)[None], everything)


def _rescale(args: Args) -> Rescale:
    names = "multiplier", "offset", "low", "high", "dtype", "largest"
    return Rescale(*(args[name] for name in names))


def _rescaling(node: Node, context: Context) -> Rescaling:
    shape = node.shape or []
    channels = shape[1] if len(shape) == 4 else shape[-1]
    return Rescaling(channels, node.args["factor"], node.args["offset"], context.device)
