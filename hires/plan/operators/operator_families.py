"""Lists operators by what a cost model asks of them: their class of kernels, and what they keep."""

from __future__ import annotations

CONV, CONV_1X1, GROUPED, TRANSPOSED = "convolution", "1x1 convolution", "grouped", "transposed"
PRODUCT, BATCH_NORM, GROUP_NORM, LAYER_NORM = "product", "batch norm", "group norm", "layer norm"
POINTWISE, POOL, RESIZE, SOFTMAX = "pointwise", "pool", "resize", "softmax"
COPY, REDUCTION, OTHER = "copy", "reduction", "other"

CLASSES = {
    "batch_norm": BATCH_NORM,
    "group_norm": GROUP_NORM,
    "instance_norm": GROUP_NORM,
    "layer_norm": LAYER_NORM,
    "rms_norm": LAYER_NORM,
    "max_pool2d": POOL,
    "avg_pool2d": POOL,
    "pixel_shuffle": RESIZE,
    "pixel_unshuffle": RESIZE,
    "softmax": SOFTMAX,
    "log_softmax": SOFTMAX,
}
"""Operator -> the class whose kernels are measured together; others follow from their entry."""
KEEPS_NOTHING = ("add", "sub", "cat", "concat", "stack", "pad", "dropout", "pixel_shuffle")
"""Operators whose backward pass reads neither their inputs nor their value."""
KEEPS_VALUE = ("relu", "sigmoid", "tanh", "softmax", "log_softmax", "hardtanh")
"""Operators whose backward pass reads their value."""
COMPILED = (
    *("q_conv2d", "q_conv_transpose2d", "q_linear", "q_dynamic_linear", "q_add", "q_requantize"),
)
"""Operators of 8 bits of which each shape has a kernel."""
CONVERTS = ("quantize", "dequantize")
"""Change between real numbers and 8-bit integers, and compute nothing else."""
ROUNDS_AGAIN = ("quantize", "q_dynamic_linear")
"""Operators that round real numbers to 8 bits."""
