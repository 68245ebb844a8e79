"""Registers the operators of quantised networks, which ``hires.plan.passes.int8_state`` makes.

Their values are unsigned 8-bit integers; scales and zero points are in their arguments, so what
is planned is complete. What lies outside the image is the zero point. Operators that only choose
among integers (max-pool, slice, cat, PixelShuffle ...) are torch's own.

    integers of a result = round(sum * factor + offset), clamped to low .. high

Input and output of ``q_dynamic_linear`` are real numbers: it quantises the rows of its input.
"""

from __future__ import annotations

from typing import Any

from hires.plan.graph import Graph, Node
from hires.plan.operators import formulas, windows
from hires.plan.operators.operator_facts import OperatorFacts, WindowFacts, declare, windowed
from hires.plan.operators.operator_table import pointwise
from hires.plan.tiling import Axes

BORDER = "zero_point"
"""The argument that holds the padding around the image."""


def transposed(node: Node, shape: list[int], graph: Graph) -> Axes:
    """Returns what a transposed convolution reads; its weight lies in another form."""
    window = (node.args[name] for name in ("kernel_size", "stride", "padding", "dilation"))
    return windows.window_axes("transposed", node, shape, *window)


_KERNELS = "hires.parallel.quantized_kernels:"


def _own(name: str, **facts: Any) -> OperatorFacts:
    return pointwise(quantized=True, own=f"{_KERNELS}{name}", **facts)


declare("quantize", _own("quantize", only_converts=True, rounds=True))
declare("dequantize", _own("dequantize", only_converts=True))
declare("q_requantize", _own("requantize", kernel_per_shape=True))
declare("q_add", _own("add", kernel_per_shape=True))
declare("q_mul", _own("multiply"))
declare("q_table", _own("looked_up"))
declare(
    "q_conv2d",
    windowed(
        WindowFacts(
            windows.convolution, f"{_KERNELS}convolution", ring=BORDER, pads=True, strips=True
        ),
        packs=f"{_KERNELS}packed_convolution",
        multiplies="output",
        residual_arg="other",
        overwritable=True,
        quantized=True,
        kernel_per_shape=True,
    ),
)
declare(
    "q_conv_transpose2d",
    windowed(
        WindowFacts(transposed, f"{_KERNELS}conv_transpose", ring=BORDER),
        packs=f"{_KERNELS}packed_transposed",
        multiplies="input",
        quantized=True,
        kernel_per_shape=True,
    ),
)
declare(
    "q_avg_pool2d",
    windowed(
        WindowFacts(windows.pool, f"{_KERNELS}avg_pool", ring=BORDER, pads=True), quantized=True
    ),
)
declare(
    "q_interpolate",
    windowed(WindowFacts(windows.interpolation, f"{_KERNELS}interpolate"), quantized=True),
)


def _linear(name: str, **facts: Any) -> OperatorFacts:
    return OperatorFacts(
        ("product",),
        multiplies="output",
        product=formulas.quantized_linear,
        quantized=True,
        own=f"{_KERNELS}{name}",
        packs=f"{_KERNELS}packed_linear",
        kernel_per_shape=True,
        **facts,
    )


declare("q_linear", _linear("linear"))
declare("q_dynamic_linear", _linear("dynamic_linear", rounds=True))
# A sum, or its upper and its lower digits where fp32 does not hold it exactly.
declare(
    "q_mean",
    OperatorFacts(
        ("channels", "reduction"),
        reduction=lambda node: int(node.args["parts"]),
        kernel=f"{_KERNELS}tiled_mean",
        own=f"{_KERNELS}whole_mean",
        quantized=True,
    ),
)
