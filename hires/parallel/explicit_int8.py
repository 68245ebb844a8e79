"""Writes quantised operators for a compiler of graphs: each product between explicit roundings.

    hires      u8 --> [ product, rescaling, rounding ] --> u8
    explicit   s8 -> dequantize -> product of real numbers -> quantize -> s8
                     weight8 -> dequantize --^   the multipliers are the scales of the weight

An integer is 128 less here: signed, as TensorRT's are. Scales, zero points and weights are those of
the quantised network, so each layer is within one step of hires' own kernels. Such a compiler
rounds in another order where it fuses, so bits are not the same. Values that are real stay so.

TensorRT has no zero points. A layer's is in its bias, and a map that the layer pads is padded with
the zero point before. All is for a rank that holds whole maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.compile_node import bind_arguments, fixed_arguments
from hires.parallel.context import Context
from hires.parallel.image_kernels import Operator, Values
from hires.parallel.quantized_kernels import phase_window
from hires.parallel.wide_convolution import pads_of
from hires.parallel.window import Window, resampled
from hires.plan.graph import Node
from hires.plan.operators.windows import pair
from hires.plan.passes.quantise import UINT8
from hires.plan.rules import reduced_dims
from hires.quant.explicit_ops import HIGHEST, LOWEST, dequantize, quantize

MIDDLE = 128
"""What an unsigned integer is above its signed one."""

Args = dict[str, Any]
Kernel = Callable[[Args], Tensor]

EXPLICIT: Registry[Callable[[Node, Context, Args], Kernel]] = Registry("explicit operator")
"""Operator -> makes the function of its arguments, in which integers are signed, from the node, its
rank and those of its arguments that are no values."""


def explicit_operator(
    node: Node, context: Context, tensors: dict[str, Tensor], own: Operator
) -> Operator:
    """Returns the callable of a node whose integers are signed, int8; ``own`` is hires' own."""
    if node.kind in EXPLICIT:
        bind = bind_arguments(node, context.device, tensors)
        kernel = EXPLICIT[node.kind](node, context, fixed_arguments(node, tensors))
        return lambda values: kernel(bind(values))
    return _moved(node, context, own) if node.dtype == UINT8 else own


def _moved(node: Node, context: Context, own: Operator) -> Operator:
    """Operators that select integers select real numbers of the same values."""
    # An operator that pads a map does so with unsigned integers.
    shift, unit = MIDDLE if "value" in node.args else 0, _scalar(1.0, context)

    def real(item: Any) -> Any:
        if not (isinstance(item, Tensor) and item.dtype == torch.int8):
            return item
        number = dequantize(item, unit)
        return number + shift if shift else number

    def run(values: Values) -> Tensor:
        made = own({name: real(values[name]) for name in node.inputs})
        return quantize(made - shift if shift else made)

    return run


@EXPLICIT.register("quantize")
def _quantize(node: Node, context: Context, fixed: Args) -> Kernel:
    factor = torch.tensor(1.0 / fixed["scale"], dtype=torch.float32).item()
    zero = fixed["zero_point"] - MIDDLE
    return lambda args: quantize(args["input"].float() * factor + zero)


@EXPLICIT.register("dequantize")
def _dequantize(node: Node, context: Context, fixed: Args) -> Kernel:
    scale, offset = _scalar(fixed["scale"], context), _zero(fixed) * fixed["scale"]
    return lambda args: dequantize(args["input"], scale) - offset


@EXPLICIT.register("q_conv2d")
def _convolution(node: Node, context: Context, fixed: Args) -> Kernel:
    how = pair(fixed["stride"]), pair(fixed["dilation"]), fixed["groups"]
    both = pads_of(fixed["weight"], fixed["padding"], how[1])
    pads, zero = [n for ends in reversed(both) for n in ends], _zero(fixed)
    even = pads[0] == pads[1] and pads[2] == pads[3]
    unit, bias = _scalar(1.0, context), _bias(fixed, fixed["other_factor"])
    factor = _scalar(fixed["other_factor"], context)

    def run(args: Args) -> Tensor:
        x, padding = dequantize(args["input"], unit), [pads[2], pads[0]]
        if any(pads) and (zero or not even):
            x, padding = _again(F.pad(x, pads, value=float(zero)), unit), [0, 0]
        weight = dequantize(args["weight"], args["multiplier"])
        y = F.conv2d(x, weight, bias, how[0], padding, *how[1:])
        other = args["other"]
        return _rounded(y if other is None else y + dequantize(other, factor), fixed)

    return run


@EXPLICIT.register("q_conv_transpose2d")
def _transposed(node: Node, context: Context, fixed: Args) -> Kernel:
    # As in hires.parallel.quantized_kernels: a convolution makes the phases of the output.
    window = Window(node, context, None, whole=True)
    pads, crops = phase_window(window, fixed["weight"])
    steps = [axis.stride for axis in window.axes]
    # The window may be more, or less, than the image.
    beyond = zip(pads, window.rect[::2], window.rect[1::2], window.size, strict=True)
    above, beside = ((a - first, b + end - size) for (a, b), first, end, size in beyond)
    unit, bias, zero = _scalar(1.0, context), _bias(fixed), float(_zero(fixed))

    def run(args: Args) -> Tensor:
        x = F.pad(dequantize(args["input"], unit), (*beside, *above), value=zero)
        weight = dequantize(args["weight"], args["multiplier"])
        y = F.conv2d(_again(x, unit), weight, bias, groups=fixed["groups"])
        n, _, height, width = y.shape
        phases = y.reshape(n, -1, *steps, height, width).permute(0, 1, 4, 2, 5, 3)
        whole = phases.reshape(n, -1, height * steps[0], width * steps[1])
        return _rounded(whole[:, :, crops[0], crops[1]], fixed)

    return run


@EXPLICIT.register("q_linear")
def _linear(node: Node, context: Context, fixed: Args) -> Kernel:
    unit, bias, weight = _scalar(1.0, context), _bias(fixed), fixed["weight"].flatten(1)

    def run(args: Args) -> Tensor:
        x = dequantize(args["input"], unit)
        return _rounded(F.linear(x, dequantize(weight, args["multiplier"]), bias), fixed)

    return run


@EXPLICIT.register("q_requantize")
def _requantize(node: Node, context: Context, fixed: Args) -> Kernel:
    factor, offset = _scalar(fixed["factor"], context), _offset(fixed, fixed["factor"])
    return lambda args: _rounded(dequantize(args["input"], factor) + offset, fixed)


@EXPLICIT.register("q_add")
def _add(node: Node, context: Context, fixed: Args) -> Kernel:
    factors = fixed["factor"], fixed["other_factor"]
    own, beside = (_scalar(factor, context) for factor in factors)
    offset = _offset(fixed, sum(factors))

    def run(args: Args) -> Tensor:
        total = dequantize(args["input"], own) + dequantize(args["other"], beside)
        return _rounded(total + offset, fixed)

    return run


@EXPLICIT.register("q_mul")
def _product(node: Node, context: Context, fixed: Args) -> Kernel:
    unit, factor = _scalar(1.0, context), _scalar(fixed["factor"], context)
    less = (fixed["other_zero_point"] - MIDDLE) * fixed["factor"]

    def run(args: Args) -> Tensor:
        scales = dequantize(args["other"], factor) - less
        return quantize((dequantize(args["input"], unit) - _zero(fixed)) * scales + _offset(fixed))

    return run


@EXPLICIT.register("q_table")
def _looked_up(node: Node, context: Context, fixed: Args) -> Kernel:
    table = torch.tensor(fixed["table"], dtype=torch.float32, device=context.device) - MIDDLE
    unit, rows = _scalar(1.0, context), table.view(-1, 1)

    def run(args: Args) -> Tensor:
        places = (dequantize(args["input"], unit) + MIDDLE).int()
        return quantize(F.embedding(places, rows).squeeze(-1))

    return run


@EXPLICIT.register("q_avg_pool2d")
def _avg_pool(node: Node, context: Context, fixed: Args) -> Kernel:
    unit, size = _scalar(1.0, context), pair(fixed["kernel_size"])
    divisor, pads = fixed["divisor_override"], fixed["count_include_pad"]
    factor = fixed["factor"] * (size[0] * size[1] / divisor if divisor else 1)
    how = fixed["stride"] or None, fixed["padding"], fixed["ceil_mode"], pads or bool(divisor)

    def run(args: Args) -> Tensor:
        real = dequantize(args["input"], unit) - _zero(fixed)
        return _rounded(F.avg_pool2d(real, size, *how) * factor + _offset(fixed), fixed)

    return run


@EXPLICIT.register("q_interpolate")
def _interpolate(node: Node, context: Context, fixed: Args) -> Kernel:
    window, factor = Window(node, context, None, whole=True), _scalar(fixed["factor"], context)
    offset = _offset(fixed, fixed["factor"])
    return lambda args: _rounded(
        resampled(window, dequantize(args["input"], factor)) + offset, fixed
    )


@EXPLICIT.register("q_mean")
def _mean(node: Node, context: Context, fixed: Args) -> Kernel:
    shape = context.plan.graph.shape(node.inputs[0])
    dims = sorted(reduced_dims(node, shape))
    unit, factor = _scalar(1.0, context), fixed["factor"] * math.prod(shape[dim] for dim in dims)
    offset = _offset(fixed, factor)

    def run(args: Args) -> Tensor:
        mean = dequantize(args["input"], unit).mean(dims, fixed["keepdim"])
        return _rounded(mean * factor + offset, fixed)

    return run


@EXPLICIT.register("avg_pool2d")
def _real_avg_pool(node: Node, context: Context, fixed: Args) -> Kernel:
    # Of whole maps torch's own divides as the image's: TensorRT takes no divisor.
    stride, divisor = fixed["stride"] or None, fixed["divisor_override"]
    names = ("kernel_size", "padding", "ceil_mode", "count_include_pad")
    how = {name: fixed[name] for name in names}
    return lambda args: F.avg_pool2d(args["self"], stride=stride, divisor_override=divisor, **how)


def _zero(fixed: Args) -> int:
    """Returns the zero point of the input as a signed integer."""
    return int(fixed["zero_point"]) - MIDDLE


def _offset(fixed: Args, factor: float = 0.0) -> float:
    """Returns the offset between signed integers, of which the inputs' are times ``factor``."""
    return float(fixed["offset"] + MIDDLE * factor - MIDDLE)


def _bias(fixed: Args, other_factor: float = 0.0) -> Tensor:
    """Returns the offset of each channel, by which signed sums become signed integers."""
    sums = fixed["weight"].double().sum((1, 2, 3))
    bias = fixed["offset"].double() + MIDDLE * (sums * fixed["multiplier"].double() + other_factor)
    whole: Tensor = bias - MIDDLE if _is_rounded(fixed) else bias
    return whole.float()


def _is_rounded(fixed: Args) -> bool:
    return bool(fixed.get("dtype", torch.uint8) == torch.uint8)


def _rounded(y: Tensor, fixed: Args) -> Tensor:
    """Returns the integers of sums between their bounds; of a layer whose output is real, that."""
    if not _is_rounded(fixed):
        return y
    low, high = fixed["low"] - MIDDLE, fixed["high"] - MIDDLE
    if (low, high) != (LOWEST, HIGHEST):
        y = y.clamp(low, high)
    return quantize(y)


def _again(x: Tensor, unit: Tensor) -> Tensor:
    """Returns padded real numbers as a product reads them: after rounding."""
    return dequantize(quantize(x), unit)


def _scalar(number: float, context: Context) -> Tensor:
    return torch.tensor(number, dtype=torch.float32, device=context.device)
