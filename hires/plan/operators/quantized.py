"""Registers the operators of quantised networks, which ``hires.plan.passes.int8_state`` makes.

Their values are unsigned 8-bit integers; scales and zero points are in their arguments, so what
is planned is complete. What lies outside the image is the zero point. Operators that only choose
among integers (max-pool, slice, cat, PixelShuffle ...) are torch's own.

    integers of a result = round(sum * factor + offset), clamped to low .. high

Input and output of ``q_dynamic_linear`` are real numbers: it quantises the rows of its input.
"""

from __future__ import annotations

from hires.plan.graph import Graph, Node
from hires.plan.operators import products, windows
from hires.plan.operators.operator_facts import OperatorFacts, WindowFacts, declare
from hires.plan.operators.operator_table import pointwise, windowed
from hires.plan.tiling import Axes

BORDER = "zero_point"
"""The argument that holds the padding around the image."""


def transposed(node: Node, shape: list[int], graph: Graph) -> Axes:
    """Returns what a transposed convolution reads; its weight lies in another form."""
    window = (node.args[name] for name in ("kernel_size", "stride", "padding", "dilation"))
    return windows.window_axes("transposed", node, shape, *window)


def resampled(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Returns what an interpolation or a pool of the image mixes, as the operator in ``mode``."""
    args = {key: node.args[key] for key in ("align_corners", "scales_h", "scales_w")}
    like = Node(node.name, f"{node.args['mode']}.default", args, node.shape, node.dtype)
    how = windows.bins if like.kind == "adaptive_avg_pool2d" else windows.interpolation
    return how(like, shape, graph)


declare("quantize dequantize q_requantize q_add q_mul q_table", pointwise(quantized=True))
declare(
    "q_conv2d",
    windowed(
        window=WindowFacts(windows.convolution, ring=BORDER, pads=True, strips=True),
        multiplies="output",
        beside="other",
        overwritable=True,
        quantized=True,
    ),
)
declare(
    "q_conv_transpose2d",
    windowed(window=WindowFacts(transposed, ring=BORDER), multiplies="input", quantized=True),
)
declare(
    "q_avg_pool2d",
    windowed(window=WindowFacts(windows.pool, ring=BORDER, pads=True), quantized=True),
)
declare("q_interpolate", windowed(window=WindowFacts(resampled), quantized=True))
declare(
    "q_linear q_dynamic_linear",
    OperatorFacts(
        ("product",),
        multiplies="output",
        product=products.quantized_linear,
        quantized=True,
    ),
)
# A sum, or its upper and its lower digits where fp32 does not hold it exactly.
declare(
    "q_mean",
    OperatorFacts(
        ("channels", "reduction"), reduction=lambda node: int(node.args["parts"]), quantized=True
    ),
)
