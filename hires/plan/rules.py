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

TILED, WHOLE = "tiled", "whole"
"""How a value lies on the tiles: each holds its rectangle, or all hold the same complete value."""

POINTWISE = frozenset(
    "relu add sub mul div neg abs exp log sqrt rsqrt pow sigmoid tanh silu gelu elu selu celu "
    "leaky_relu prelu hardtanh relu6 hardswish hardsigmoid mish softplus clamp clamp_min clamp_max "
    "clone to _to_copy where maximum minimum square sin cos detach log_sigmoid threshold".split()
)
"""Operations on every number alone; operands align because tiles of equal maps are equal."""

CHANNELWISE = {
    "cat": "dim",
    "chunk": "dim",
    "split": "dim",
    "slice": "dim",
    "softmax": "dim",
    "log_softmax": "dim",
    "glu": "dim",
    "mean": "dim",
    "amax": "dim",
    "sum": "dim",
}
"""Operations along one dim, and the argument that names it: local if the dim is the channels."""


@dataclass(frozen=True)
class Rule:
    """How the tiles compute one node together."""

    kind: str
    """``pointwise``, ``window``, ``norm`` or ``reduce``; ``whole`` if all inputs are whole values."""
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
    if not tiled:
        return Rule("whole")
    if any(layout[name] == WHOLE and not _broadcasts(graph, name) for name in node.inputs):
        return None
    if node.kind == "getitem":
        return Rule("pointwise")
    if len(graph.shape(tiled[0])) != 4:
        return None
    if node.kind in POINTWISE:
        return Rule("pointwise") if _aligned(node, graph, tiled) else None
    if node.kind == "dropout":
        return None if node.args["train"] and node.args["p"] > 0 else Rule("pointwise")
    if node.kind == "batch_norm":
        return Rule("norm" if node.args["training"] else "pointwise")
    if _is_global_pool(node, graph.shape(tiled[0])):
        return Rule("reduce")
    if node.kind in WINDOWS and len(tiled) == 1:
        axes = WINDOWS[node.kind](node, graph.shape(tiled[0]), graph)
        if axes is not None:
            return Rule("window", axes)
    if node.kind in CHANNELWISE and _along_channels(node):
        return Rule("pointwise")
    return None


def _aligned(node: Node, graph: Graph, tiled: list[str]) -> bool:
    """Whether all tiled operands have the map size of the result."""
    return all(node.shape is not None and graph.shape(v)[2:] == node.shape[2:] for v in tiled)


def _broadcasts(graph: Graph, value: str) -> bool:
    """Whether a whole value has no rows and columns of its own, so that tiles can use it."""
    shape = graph.shape(value)
    return len(shape) < 2 or (len(shape) == 4 and shape[2:] == [1, 1])


def _along_channels(node: Node) -> bool:
    """Whether an operation along dims works along the channels only."""
    dims = node.args.get(CHANNELWISE[node.kind])
    listed = dims if isinstance(dims, list) else [dims]
    if set(listed) - {1, -3}:
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
    weight = node.args["weight"]
    shape = graph.params[weight["param"]].shape if "param" in weight else graph.shape(weight["value"])
    return shape[2:]


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
    return _windows(node, shape, kernel, stride, pair(padding), dilation)


def _pool(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Max- and average pools; a missing stride is the kernel."""
    kernel = pair(node.args["kernel_size"])
    stride = pair(node.args["stride"] or kernel)
    dilation = pair(node.args.get("dilation", 1))
    return _windows(node, shape, kernel, stride, pair(node.args["padding"]), dilation)


def _windows(
    node: Node,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Axes:
    """Returns two window axes."""
    assert node.shape is not None
    rows, cols = (
        Axis("window", shape[2 + i], node.shape[2 + i], kernel[i], stride[i], padding[i], dilation[i])
        for i in (0, 1)
    )
    return rows, cols


def _conv_transpose(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Transposed convolution."""
    assert node.shape is not None
    kernel, stride = _kernel(node, graph), pair(node.args["stride"])
    padding, dilation = pair(node.args["padding"]), pair(node.args["dilation"])
    rows, cols = (
        Axis(
            "transposed", shape[2 + i], node.shape[2 + i], kernel[i], stride[i], padding[i], dilation[i]
        )
        for i in (0, 1)
    )
    return rows, cols


def _pad(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Constant padding and cropping of rows and columns."""
    pads = node.args["pad"] + [0] * (4 - len(node.args["pad"]))
    if node.args.get("mode", "constant") != "constant" or any(pads[4:]):
        return None
    return _windows(node, shape, [1, 1], [1, 1], [pads[2], pads[0]], [1, 1])


def _slice(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """A crop of rows or columns, also with a step."""
    dim = node.args["dim"] % 4
    if dim < 2:
        return None
    start = node.args["start"] or 0
    start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
    stride, padding = [1, 1], [0, 0]
    stride[dim - 2], padding[dim - 2] = node.args["step"], -start
    return _windows(node, shape, [1, 1], stride, padding, [1, 1])


def _interpolate(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Nearest and bilinear interpolation, as PyTorch computes the source positions."""
    assert node.shape is not None
    corners = bool(node.args.get("align_corners"))
    kind = {
        "upsample_nearest2d": "nearest",
        "_upsample_nearest_exact2d": "nearest_exact",
        "upsample_bilinear2d": "linear_corners" if corners else "linear",
    }[node.kind]
    given = node.args.get("scale_factors") or [None, None]
    axes = []
    for i in (0, 1):
        size_in, size_out = shape[2 + i], node.shape[2 + i]
        if corners:
            scale = (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
        else:
            scale = 1.0 / given[i] if given[i] else size_in / size_out
        axes.append(Axis(kind, size_in, size_out, scale=scale))
    return axes[0], axes[1]


def _pixel_shuffle(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Channels become an upscale_factor times larger image."""
    assert node.shape is not None
    factor = node.args["upscale_factor"]
    rows, cols = (
        Axis("shuffle", shape[2 + i], node.shape[2 + i], stride=factor) for i in (0, 1)
    )
    return rows, cols


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
