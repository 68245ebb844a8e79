"""Which operation can be computed tile by tile, and how?

A rule says what a tile needs for its part of an operation's value: nothing but its own pixels
(pointwise), a window of the neighbours' pixels (window), statistics of the whole image (norm), or
a sum over the whole image, after which all tiles hold the same value (reduce).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hires.plan.graph import Graph, Node
from hires.plan.tiling import Axes, Axis

TILED, WHOLE, SHARDED = "tiled", "whole", "sharded"
"""How a value lies on the ranks of a stage: each holds its rectangle, or all hold the same complete
value, or each holds some samples."""

POINTWISE = {
    *("relu", "relu6", "leaky_relu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("sigmoid", "log_sigmoid", "hardsigmoid", "tanh", "hardtanh", "hardswish", "softplus"),
    *("softshrink", "hardshrink", "threshold", "clamp", "clamp_min", "clamp_max", "logit"),
    *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sign", "reciprocal", "square", "pow"),
    *("exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "sin", "cos", "atan", "erf"),
    *("floor", "ceil", "round", "trunc", "frac", "fmod", "remainder", "maximum", "minimum"),
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "nan_to_num", "where", "masked_fill", "lerp"),
    *("logical_and", "logical_or", "logical_not", "logical_xor", "addcmul", "addcdiv"),
    *("clone", "detach", "to", "_to_copy", "type_as", "zeros_like", "ones_like", "full_like"),
}
"""Operations on every number alone; operands align because tiles of equal maps are equal."""

CHANNELWISE = {"cat", "chunk", "split", "split_with_sizes", "slice"} | {
    *("softmax", "log_softmax", "glu", "mean", "sum", "amax", "amin"),
}
"""Operations along the argument ``dim``: local if it is the channels."""

DROPOUTS = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
"""Random in training, nothing at all otherwise."""

RANDOM = {"bernoulli", "multinomial", "normal", "rand", "rand_like", "randint", "randn"} | {
    *("randint_like", "randn_like", "randperm", "rrelu"),
}
"""Operations that every rank would compute differently."""


@dataclass(frozen=True)
class Rule:
    """How the tiles compute one node together."""

    kind: str
    """``pointwise``, ``window``, ``norm`` or ``reduce``; ``whole`` if all inputs are whole."""
    axes: Axes | None = None
    """``window`` only: which pixels of the one input each output pixel depends on."""

    @property
    def result(self) -> str:
        """How the value lies on the tiles."""
        return WHOLE if self.kind in ("reduce", "whole") else TILED


def rule_of(node: Node, graph: Graph, layout: dict[str, str]) -> Rule | None:
    """Returns the rule of a node, or None if tiles cannot compute it.

    Args:
        node: a node of the graph.
        graph: the network.
        layout: TILED or WHOLE for each value that the node reads.
    """
    tiled = [name for name in node.inputs if layout[name] == TILED]
    if is_random(node):
        return None  # also behind the global pool, where all tiles must compute alike
    if not tiled:
        return Rule("whole")
    if node.kind == "getitem":
        return Rule("pointwise")
    if len(graph.shape(tiled[0])) != 4:
        return None
    if node.kind in POINTWISE:
        return Rule("pointwise") if _aligned(node, graph, tiled) else None
    if node.kind in CHANNELWISE and _along_channels(node):
        return Rule("pointwise") if tiled == node.inputs and not node.params else None
    return _rule_of_one(node, graph, tiled[0]) if _reads_only(node, tiled[0]) else None


def _rule_of_one(node: Node, graph: Graph, value: str) -> Rule | None:
    """Returns the rule of a node that reads one value, which is tiled."""
    if node.kind in DROPOUTS:
        return Rule("pointwise")
    if node.kind == "batch_norm":
        return Rule("norm" if node.args["training"] else "pointwise")
    if _is_global_pool(node, graph.shape(value)):
        return Rule("reduce")
    axes = WINDOWS[node.kind](node, graph.shape(value), graph) if node.kind in WINDOWS else None
    return None if axes is None else Rule("window", axes)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    if node.kind in DROPOUTS:
        return bool(node.args["train"]) and node.args["p"] > 0
    return node.kind in RANDOM and bool(node.args.get("training", True))


def _aligned(node: Node, graph: Graph, tiled: list[str]) -> bool:
    """Whether tiled operands have the result's map size and others no rows or columns at all."""
    if node.shape is None or any(graph.shape(name)[2:] != node.shape[2:] for name in tiled):
        return False
    others = [graph.shape(name) for name in node.inputs if name not in tiled]
    # Only prelu takes a vector for one number per channel; elsewhere its dim is the columns.
    others += [graph.params[name].shape for name in node.params if node.kind != "prelu"]
    return all(length == 1 for shape in others for length in shape[-2:])


def _reads_only(node: Node, value: str) -> bool:
    """Whether a value is read as the first argument, and no other argument is a value.

    A weight that the network computes would need the sum of its gradient over the tiles.
    """
    first, *others = node.args.values()
    return first == {"value": value} and not any(
        "value" in a for a in others if isinstance(a, dict)
    )


def _along_channels(node: Node) -> bool:
    """Whether an operation along dims works along the channels only."""
    dims = node.args.get("dim")
    listed = dims if isinstance(dims, list) else [dims]
    if not listed or set(listed) - {1, -3}:
        return False
    return bool(node.args.get("keepdim", True))


def _is_global_pool(node: Node, shape: list[int]) -> bool:
    """Whether a node averages over the whole image."""
    if node.kind == "adaptive_avg_pool2d":
        return pair(node.args["output_size"]) == [1, 1]
    if node.kind == "mean" and isinstance(node.args.get("dim"), list):
        return sorted(d % len(shape) for d in node.args["dim"]) == [2, 3]
    return False


def pair(value: Any) -> list[int]:
    """Returns [rows, cols] of an argument that is one number, one in a list, or two."""
    if isinstance(value, int):
        return [value, value]
    return [value[0], value[0]] if len(value) == 1 else list(value)


def _kernel(node: Node, graph: Graph) -> list[int]:
    """Returns the rows and columns of a convolution's weight."""
    return graph.params[node.args["weight"]["param"]].shape[2:]


def _conv(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Convolution with any stride, padding, dilation and groups."""
    kernel = _kernel(node, graph)
    stride, dilation = pair(node.args["stride"]), pair(node.args["dilation"])
    padding = node.args["padding"]
    if padding == "same":
        # PyTorch puts the odd row of an even kernel behind the image.
        padding = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    elif padding == "valid":
        padding = [0, 0]
    return _axes("window", node, shape, (kernel, stride, pair(padding), dilation))


def _pool(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Max- and average pools; a missing stride is the kernel."""
    kernel = pair(node.args["kernel_size"])
    stride = pair(node.args["stride"] or kernel)
    padding, dilation = pair(node.args["padding"]), pair(node.args.get("dilation", 1))
    return _axes("window", node, shape, (kernel, stride, padding, dilation))


def _conv_transpose(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Transposed convolution."""
    kernel, stride = _kernel(node, graph), pair(node.args["stride"])
    padding, dilation = pair(node.args["padding"]), pair(node.args["dilation"])
    return _axes("transposed", node, shape, (kernel, stride, padding, dilation))


def _pad(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Constant padding and cropping of rows and columns."""
    pads = node.args["pad"] + [0] * (4 - len(node.args["pad"]))
    if node.args.get("mode", "constant") != "constant" or any(pads[4:]):
        return None
    return _axes("window", node, shape, ([1, 1], [1, 1], [pads[2], pads[0]], [1, 1]))


def _slice(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """A crop of rows or columns, also with a step."""
    dim = node.args["dim"] % 4
    if dim < 2:
        return None
    start = node.args["start"] or 0
    start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
    stride, padding = [1, 1], [0, 0]
    stride[dim - 2], padding[dim - 2] = node.args["step"], -start
    return _axes("window", node, shape, ([1, 1], stride, padding, [1, 1]))


def _interpolate(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Nearest and bilinear interpolation, as PyTorch computes the source positions."""
    assert node.shape is not None
    corners = bool(node.args.get("align_corners"))
    kind = {
        "upsample_nearest2d": "nearest",
        "_upsample_nearest_exact2d": "nearest_exact",
        "upsample_bilinear2d": "linear_corners" if corners else "linear",
    }[node.kind]
    given = node.args.get("scale_factors") or [node.args.get(f"scales_{dim}") for dim in "hw"]
    axes = []
    for size_in, size_out, factor in zip(shape[2:], node.shape[2:], given, strict=True):
        scale = 1.0 / factor if factor else size_in / size_out
        if corners:
            scale = (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
        axes.append(Axis(kind, size_in, size_out, scale=scale))
    return axes[0], axes[1]


def _pixel_shuffle(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Channels become an upscale_factor times larger image."""
    factor = pair(node.args["upscale_factor"])
    return _axes("shuffle", node, shape, ([1, 1], factor, [0, 0], [1, 1]))


def _axes(kind: str, node: Node, shape: list[int], window: tuple[list[int], ...]) -> Axes:
    """Returns the axes of [rows, cols] of kernel, stride, padding and dilation."""
    assert node.shape is not None
    made = []
    for i in (0, 1):
        kernel, stride, padding, dilation = (numbers[i] for numbers in window)
        size = shape[2 + i], node.shape[2 + i]
        made.append(Axis(kind, *size, kernel, stride, padding, dilation))
    return made[0], made[1]


WINDOWS: dict[str, Callable[[Node, list[int], Graph], Axes | None]] = {
    "conv2d": _conv,
    "conv_transpose2d": _conv_transpose,
    "max_pool2d": _pool,
    "avg_pool2d": _pool,
    "pad": _pad,
    "constant_pad_nd": _pad,
    "slice": _slice,
    "upsample_nearest2d": _interpolate,
    "_upsample_nearest_exact2d": _interpolate,
    "upsample_bilinear2d": _interpolate,
    "pixel_shuffle": _pixel_shuffle,
}
"""Operator -> the axes of its window, or None if this use of it cannot be tiled."""
