"""Says which pixels windowed operators read: a function for each way of reading them.

Each takes (node, shape of its input (n, C, H, W), network) and returns rows and columns, or None if
this use cannot be tiled.
"""

from __future__ import annotations

from typing import Any

from hires.plan.graph import Graph, Node
from hires.plan.tiling import Axes, Axis


def pair(value: Any) -> list[int]:
    """Returns [rows, cols] of an argument that is one number, one in a list, or two."""
    if isinstance(value, int):
        return [value, value]
    return [value[0], value[0]] if len(value) == 1 else list(value)


def window_axes(kind: str, node: Node, shape: list[int], *window: list[int]) -> Axes:
    """Returns the axes of a node; ``window``: [rows, cols] of kernel, stride, padding, dilation."""
    assert node.shape is not None
    rows, cols = zip(*window, strict=True)
    return Axis(kind, shape[2], node.shape[2], *rows), Axis(kind, shape[3], node.shape[3], *cols)


def convolution(node: Node, shape: list[int], graph: Graph) -> Axes:
    """Returns what a convolution reads; its weight may be computed."""
    [(source, weight)] = node.args["weight"].items()
    kernel = (graph.params[weight].shape if source == "param" else graph.shape(weight))[2:]
    stride, dilation = pair(node.args["stride"]), pair(node.args["dilation"])
    padding = node.args["padding"]
    if padding == "same":
        # PyTorch puts the odd row of an even kernel behind the image.
        padding = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    elif padding == "valid":
        padding = [0, 0]
    kind = "transposed" if node.kind == "conv_transpose2d" else "window"
    return window_axes(kind, node, shape, kernel, stride, pair(padding), dilation)


def pool(node: Node, shape: list[int], graph: Graph) -> Axes:
    """Returns what a pool reads."""
    kernel = pair(node.args["kernel_size"])
    stride = pair(node.args["stride"] or kernel)
    padding, dilation = pair(node.args["padding"]), pair(node.args.get("dilation", 1))
    return window_axes("window", node, shape, kernel, stride, padding, dilation)


def pad(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Returns what a pad reads; None: samples, or channels by another mode than a constant."""
    pads: list[int] = node.args["pad"] if "pad" in node.args else node.args["padding"]
    mode = node.args.get("mode", _PAD_MODES.get(node.kind, "constant"))
    left, _, top, _, *channels = [*pads, *[0] * (4 - len(pads))]
    if mode != "constant":
        cropped = mode == "circular" and min(pads) < 0
        return (
            None
            if channels or cropped
            else window_axes(mode, node, shape, [1, 1], [1, 1], [top, left], [1, 1])
        )
    if any(channels[2:]):  # samples
        return None
    return window_axes("window", node, shape, [1, 1], [1, 1], [top, left], [1, 1])


_PAD_MODES = {"reflection_pad2d": "reflect", "replication_pad2d": "replicate"}


def roll(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Returns what a roll reads; None: it moves channels or samples."""
    shifts, dims = node.args["shifts"], node.args["dims"]
    by_dim: dict[int, int] = {}
    for dim, shift in zip(dims, shifts, strict=False):
        by_dim[dim % 4] = by_dim.get(dim % 4, 0) + shift
    if len(dims) != len(shifts) or by_dim.keys() - {2, 3}:
        return None
    before = [by_dim.get(dim, 0) for dim in (2, 3)]
    kinds = ["circular" if rows else "window" for rows in before]
    sizes = zip(kinds, shape[2:], before, strict=True)
    rows, cols = (Axis(kind, size, size, padding=shift) for kind, size, shift in sizes)
    return rows, cols


def interleave(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Returns what copies of rows or columns read."""
    dim, times = node.args["dim"], node.args["repeats"]
    if dim is None or dim % 4 < 2 or not isinstance(times, int) or len(node.shape or []) != 4:
        return None
    assert node.shape is not None
    kinds = ["copies" if place == dim % 4 else "window" for place in (2, 3)]
    sizes = zip(kinds, shape[2:], node.shape[2:], strict=True)
    rows, cols = (Axis(kind, *size) for kind, *size in sizes)
    return rows, cols


def cut_out(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Returns what a slice reads; None: it is of channels or samples."""
    dim = node.args["dim"] % 4
    if dim < 2:
        return None
    start = node.args["start"] or 0
    start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
    stride, padding = [1, 1], [0, 0]
    stride[dim - 2], padding[dim - 2] = node.args["step"], -start
    return window_axes("window", node, shape, [1, 1], stride, padding, [1, 1])


def interpolation(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Returns what an interpolation mixes, or an adaptive pool of integers; ``mode`` names it."""
    assert node.shape is not None
    name, corners = node.args.get("mode", node.kind), bool(node.args.get("align_corners"))
    if name == "adaptive_avg_pool2d":
        return bins(node, shape, graph)
    if name.endswith("_aa") and corners:
        return None
    kind = "cubic" if "bicubic" in name else "linear"
    if "nearest" in name:
        kind = "nearest_exact" if "exact" in name else "nearest"
    kind += ("_smooth" if name.endswith("_aa") else "") + ("_corners" if corners else "")
    given = node.args.get("scale_factors") or [node.args.get(f"scales_{dim}") for dim in "hw"]
    axes = []
    for size_in, size_out, factor in zip(shape[2:], node.shape[2:], given, strict=True):
        scale = 1.0 / factor if factor else size_in / size_out
        if corners:
            scale = (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
        axes.append(Axis(kind, size_in, size_out, scale=scale))
    return axes[0], axes[1]


def bins(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Returns what an adaptive pool reads."""
    if node.shape is None:  # also the indices of the maxima
        return None
    rows, cols = (Axis("bins", *size) for size in zip(shape[2:], node.shape[2:], strict=True))
    return rows, cols


def pixel_unshuffle(node: Node, shape: list[int], graph: Graph) -> Axes:
    """Returns what the inverse of PixelShuffle reads."""
    factor = pair(node.args["downscale_factor"])
    return window_axes("window", node, shape, factor, factor, [0, 0], [1, 1])


def pixel_shuffle(node: Node, shape: list[int], graph: Graph) -> Axes:
    """Returns what PixelShuffle reads."""
    factor = pair(node.args["upscale_factor"])
    return window_axes("shuffle", node, shape, [1, 1], factor, [0, 0], [1, 1])


def moved_pads(node: Node, order: list[int]) -> dict[str, Any]:
    """Returns a pad for an input whose dims lie in another order."""
    pads = [*node.args["pad"], *[0] * 8]
    pairs = [pads[2 * (3 - dim) : 2 * (4 - dim)] for dim in order]  # pads begin with the last dim
    while len(pairs) > 2 and not any(pairs[0]):
        pairs.pop(0)
    return {"pad": [number for pair in reversed(pairs) for number in pair]}


def moved_dim(node: Node, order: list[int]) -> dict[str, Any]:
    """Returns the ``dim`` of an input whose dims lie in another order."""
    return {"dim": order.index(node.args["dim"] % 4)}


def moved_dims(node: Node, order: list[int]) -> dict[str, Any]:
    """Returns the ``dims`` of an input whose dims lie in another order."""
    return {"dims": [order.index(dim % 4) for dim in node.args["dims"]]}
