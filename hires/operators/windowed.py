"""Declares torch's windowed operators, each with the kernel that computes it on one tile.

A kernel gets its :class:`~hires.parallel.window.Window`, the pixels of that window and the
arguments by name, and returns exactly the outputs that the tile owns. A window of pixels:

    output rows of a tile           a       b                 kernel k, stride s, padding p,
                                    :       :                 dilation d
    input rows that they need   a*s - p  ... (b-1)*s - p + d*(k-1)

A need beyond the tile's own rows is a halo, a need beyond the image is the ring.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from hires.plan.operators import windows
from hires.plan.operators.operator_facts import OperatorFacts, WindowFacts, declare, windowed
from hires.plan.tiling import RESAMPLINGS

if TYPE_CHECKING:
    from torch import Tensor

    from hires.parallel.window import Window

_INT8 = "hires.plan.passes.int8_rules:"


def convolution(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns a convolution, with what follows it where it is fused."""
    from hires.parallel.fused_products import convolve_fused

    args = {**args, "weight": w.kept.get("weight", args["weight"])}
    return convolve_fused(x, args, w.padding, w.overwrites)


def conv_transpose(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns all outputs that the window's pixels reach, cut to those that the tile makes."""
    import torch.nn.functional as F

    from hires.parallel.torch_faults import convolve_transposed

    how = args["stride"], 0, 0, args["groups"], args["dilation"]
    raw = convolve_transposed(x, args["weight"], None, *how)
    pads: list[int] = []
    for dim in (1, 0):  # F.pad counts from the last dim
        axis, first = w.axes[dim], w.rect[2 * dim]
        begin = first * axis.stride - axis.padding  # output row of the first raw row
        wanted = w.out[2 * dim : 2 * dim + 2]
        pads += [begin - wanted[0], wanted[1] - (begin + raw.shape[2 + dim])]
    y = F.pad(raw, pads)
    return y if args["bias"] is None else y + args["bias"].view(1, -1, 1, 1)


declare(
    "conv2d",
    windowed(
        WindowFacts(windows.convolution, convolution, ring=0.0, pads=True, strips=True),
        multiplies="output",
        overwritable=True,
        weight_channels=0,
        fused="fused_conv2d",
        int8=f"{_INT8}convolution",
    ),
)
declare(
    "fused_conv2d",  # of networks that hires.plan.passes rewrites
    windowed(
        WindowFacts(windows.convolution, convolution, ring=0.0, pads=True, strips=True),
        packs="hires.parallel.fused_products:packed_convolution",
        multiplies="output",
        residual_arg="other",
        overwritable=True,
        int8=f"{_INT8}convolution",
    ),
)
declare(
    "conv_transpose2d",
    windowed(
        WindowFacts(windows.convolution, conv_transpose),
        multiplies="input",
        weight_channels=1,
        int8=f"{_INT8}transposed",
    ),
)


def max_pool(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns the largest number of each window."""
    from hires.parallel.window import max_pool

    size, stride = args["kernel_size"], args["stride"] or None
    return max_pool(x, size, stride, w.padding, args["dilation"], args["ceil_mode"])


def avg_pool(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns means, by the divisors of the whole image, which are others near its border."""
    import torch.nn.functional as F

    from hires.parallel.window import pool_divisors

    size, stride = args["kernel_size"], args["stride"] or None
    total = F.avg_pool2d(x, size, stride, w.padding, args["ceil_mode"], divisor_override=1)
    mean: Tensor = total / pool_divisors(w, args, x)
    return mean


def max_of_bins(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns maxima along the columns, then along the rows.

    So of equal maxima the first row by row has the gradient, as in torch. Shorter bins repeat their
    last row.
    """
    import torch

    for dim in (3, 2):
        rows = w.tap_rows(dim, x.device)
        apart = torch.unflatten(x.index_select(dim, rows.flatten()), dim, rows.shape)
        x = apart.max(dim).values  # the first of equal ones
    return x


def resample(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns rows and columns mixed."""
    from hires.parallel.window import resampled

    return resampled(w, x).to(x.dtype)


declare(
    "max_pool2d",
    windowed(
        WindowFacts(windows.pool, max_pool, ring=-math.inf, pads=True),
        is_selection=True,
        family="pool",
        has_kinks=True,
        keeps="inputs places",
    ),
)
declare(
    "avg_pool2d",
    windowed(
        WindowFacts(windows.pool, avg_pool, ring=0.0, pads=True),
        family="pool",
        int8=f"{_INT8}avg_pool",
    ),
)
adaptive = functools.partial(
    OperatorFacts,
    ("reduction", "window"),
    "output_size",
    kernel="hires.parallel.reductions:reduction",
)
"""Makes the entry of a pool whose windows follow from the size of its output."""
declare(
    "adaptive_avg_pool2d",
    adaptive(
        window=WindowFacts(windows.bins, resample),
        reduction=lambda node: 1,
        int8=f"{_INT8}adaptive_pool",
    ),
)
declare(
    "adaptive_max_pool2d",
    adaptive(
        window=WindowFacts(windows.bins, max_of_bins),
        reduction=lambda node: 3,
        has_kinks=True,
        keeps="inputs places",
    ),
)


def pad(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns the window with its ring, and channels around it."""
    import torch.nn.functional as F

    if w.axes[0].kind in RESAMPLINGS:
        return resample(w, x, args)
    channels = args["pad"][4:]
    return F.pad(x, [0, 0, 0, 0, *channels], value=args["value"] or 0.0) if channels else x


def every_row(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns every so many rows and columns."""
    return x[:, :, :: w.axes[0].stride, :: w.axes[1].stride]


declare(
    "pad constant_pad_nd",
    windowed(
        WindowFacts(windows.pad, pad, ring="value", moved=windows.moved_pads),
        is_selection=True,
    ),
)
declare(
    "reflection_pad2d replication_pad2d",
    windowed(WindowFacts(windows.pad, resample), is_selection=True, keeps="inputs"),
)
declare(
    "roll",
    OperatorFacts(
        ("window",),
        "dims",
        window=WindowFacts(windows.roll, resample, moved=windows.moved_dims),
        is_selection=True,
    ),
)
declare(
    "slice",
    OperatorFacts(
        ("window", "channels", "strided"),
        window=WindowFacts(windows.cut_out, every_row, ring=0.0, moved=windows.moved_dim),
        is_selection=True,
    ),
)


def unshuffle(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns pixels as channels."""
    import torch.nn.functional as F

    return F.pixel_unshuffle(x, args["downscale_factor"])


def shuffle(w: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    """Returns channels as pixels, those that the tile makes."""
    import torch.nn.functional as F

    from hires.parallel.halo import part

    factor = w.axes[0].stride
    r0, r1, c0, c1 = (edge * factor for edge in w.rect)
    return part(F.pixel_shuffle(x, factor), (r0, r1, c0, c1), w.out)


declare(
    "upsample_nearest2d _upsample_nearest_exact2d",
    windowed(WindowFacts(windows.interpolation, resample), is_selection=True),
)
declare(
    "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    windowed(WindowFacts(windows.interpolation, resample), keeps="", int8=f"{_INT8}mixed"),
)
declare(
    "pixel_shuffle",
    windowed(WindowFacts(windows.pixel_shuffle, shuffle), is_selection=True, family="resize"),
)
declare(
    "pixel_unshuffle",
    windowed(WindowFacts(windows.pixel_unshuffle, unshuffle), is_selection=True, family="resize"),
)
declare(
    "repeat_interleave",
    OperatorFacts(
        ("channels", "window"), window=WindowFacts(windows.interleave, resample), is_selection=True
    ),
)
