"""Interpolation reads the rows that PyTorch reads, for every way to ask for a size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hires.plan.graph import INPUT, Graph, Node
from hires.plan.rules import window_axes_of
from hires.plan.tiling import Axis
from tests.helpers.tiny_nets import traced

OPERATORS = {
    "nearest": "upsample_nearest2d",
    "nearest-exact": "_upsample_nearest_exact2d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
}


LENGTHS = (1, 2, 3, 5, 7, 8, 13, 40)


TARGETS = (1, 2, 3, 4, 6, 10, 14, 16, 27, 41, 47, 80)


FACTORS = (0.3, 0.5, 2 / 3, 0.9, 1.0, 1.1, 1.5, 2.0, 2.3, 3.0)


def column(length: int, order: torch.memory_format) -> Tensor:
    """Rows that hold their own index; PyTorch has a kernel for either memory order."""
    rows = torch.arange(length, dtype=torch.float64).view(1, 1, -1, 1)
    return rows.expand(1, 8, length, 2).contiguous(memory_format=order)


def axis_of(length: int, **how: Any) -> Axis:
    """The rows' axis of an interpolation, its node written by hand as torch.export writes it."""
    size_out = F.interpolate(column(length, torch.contiguous_format), **how).shape[2]
    args = {
        "input": {"value": INPUT},
        "align_corners": how.get("align_corners"),
        "scale_factors": None if how.get("recompute_scale_factor") else how.get("scale_factor"),
    }
    smooth = "_" + OPERATORS[how["mode"]] + "_aa" if how.get("antialias") else None
    node = Node(
        "up", f"{smooth or OPERATORS[how['mode']]}.vec", args, [1, 8, size_out, 2], "float64"
    )
    graph = Graph([node], "up", [1, 8, length, 2])
    axes = window_axes_of(node, graph)
    assert axes is not None
    return axes[0]


def check(length: int, **how: Any) -> None:
    """Compares what a row of the result is made of with PyTorch's own result."""
    axis = axis_of(length, **how)
    made = [sum(row * part for row, part in axis.taps(out)) for out in range(axis.size_out)]
    for order in (torch.channels_last, torch.contiguous_format):
        expected = F.interpolate(column(length, order), **how)
        assert made == pytest.approx(expected[0, 0, :, 0].tolist(), abs=1e-12)


@pytest.mark.parametrize("mode", OPERATORS)
def test_nodes_written_by_hand_are_as_torch_exports_them(mode):
    how: dict[str, Any] = {"scale_factor": (2.3, 1.0), "mode": mode}
    [node] = traced(lambda n, x: F.interpolate(x, **how), (1, 8, 7, 2)).nodes
    assert node.op == f"{OPERATORS[mode]}.vec"
    assert node.args["scale_factors"] == [2.3, 1.0]
    axes = window_axes_of(node, Graph([node], node.name, [1, 8, 7, 2]))
    assert axes is not None
    assert axes[0] == axis_of(7, **how)


# Nearest was computed in double precision, and without PyTorch's special cases: an image of 2 rows
# enlarged by 1.1 keeps its rows, one enlarged to 41 takes row 0 for row 20, which lies halfway.
@pytest.mark.parametrize("mode", [*OPERATORS])
def test_sources_for_every_size_and_scale_factor(mode):
    for length in LENGTHS:
        for target in TARGETS:
            check(length, size=(target, 2), mode=mode)
        for factor in FACTORS:
            if int(length * factor) > 0:
                check(length, scale_factor=(factor, 1.0), mode=mode)
                check(length, scale_factor=(factor, 1.0), mode=mode, recompute_scale_factor=True)


@pytest.mark.parametrize("how", ["align_corners", "antialias"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_sources_with_aligned_corners_and_of_smooth_scaling(mode, how):
    for length in LENGTHS:
        for target in TARGETS if mode == "bilinear" or how == "antialias" else (19,):
            check(length, size=(target, 2), mode=mode, **{how: True})
        check(length, scale_factor=(2.3, 1.0), mode=mode, **{how: True})
