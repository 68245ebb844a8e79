"""Which operations tiles can compute, and the rows that interpolation reads; others are named."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import PlanError
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.rules import rule_in, window_axes_of
from hires.plan.tiling import Axis, need_of, own_rect
from tests.helpers.tiny_nets import Forward, Net, tiled, traced


def rules(forward: Forward, training: bool = True, **parts: Any) -> list[tuple[str, str, Any]]:
    """The (operation, rule, axes) of every node."""
    graph = traced(forward, training=training, **parts)
    stage, findings = tiled(graph)
    assert not findings
    found = []
    for node in graph.nodes:
        rule = rule_in(stage, node, graph)
        assert rule is not None
        assert rule.result == stage.layout[node.name]
        found.append((node.kind, rule.kind, rule.axes))
    return found


def write_to_channels(n: Any, x: Tensor) -> Tensor:
    y = x * 2
    y[:, :2] = y[:, 2:] + 1
    y[:, 3:] = 0
    y[:, -2] = y[:, 0]
    return y


@pytest.mark.parametrize(
    "forward",
    [
        write_to_channels,
        lambda n, x: 1 - x,
        lambda n, x: 1 / (x + 2),
        lambda n, x: torch.where(x > 0, x, 0.5 * x),
        lambda n, x: x.masked_fill(x.isnan(), 0.0).clamp(-1, 1),
        lambda n, x: (x.double() + torch.zeros_like(x)).float().contiguous() ** 2,
        lambda n, x: x * n.scale + n.one,
        lambda n, x: torch.cat([x, x[:, :2], *x.chunk(2, 1), *x.split([1, 3], 1)], dim=-3),
        lambda n, x: F.glu(x, 1) * x.mean(1, keepdim=True) + x.amax((1,), keepdim=True),
    ],
)
def test_numbers_on_their_own_and_channels_stay_in_their_tile(forward):
    parts = {"scale": nn.Parameter(torch.ones(4, 1, 1)), "one": nn.Parameter(torch.ones(1))}
    assert {kind for _, kind, _ in rules(forward, **parts)} == {"pointwise"}


# (forward, parts): windows of every kind, sizes that do not divide, borders that differ.
WINDOWED: list[tuple[Forward, dict[str, nn.Module]]] = [
    (lambda n, x: n.op(x), {"op": nn.Conv2d(4, 3, 3, 2, 1)}),
    (lambda n, x: n.op(x), {"op": nn.Conv2d(4, 3, 7, 3, 3)}),
    (lambda n, x: n.op(x), {"op": nn.Conv2d(4, 4, 3, padding=4, dilation=4, groups=2)}),
    (lambda n, x: n.op(x), {"op": nn.Conv2d(4, 4, (4, 2), padding=(1, 0))}),
    (lambda n, x: n.op(x), {"op": nn.Conv2d(4, 4, (4, 3), padding="same", dilation=(1, 3))}),
    (lambda n, x: n.op(x), {"op": nn.Conv2d(4, 4, 2, padding="valid")}),
    (lambda n, x: n.op(x), {"op": nn.ConvTranspose2d(4, 2, 4, 3, 1, 1, dilation=2)}),
    (lambda n, x: n.op(x), {"op": nn.ConvTranspose2d(4, 4, 2, 2, groups=2, bias=False)}),
    (lambda n, x: n.op(x), {"op": nn.ConvTranspose2d(4, 2, 3, 1, 2)}),
    (lambda n, x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), {}),
    (lambda n, x: F.max_pool2d(x, (2, 3), 1, dilation=2), {}),
    (lambda n, x: F.avg_pool2d(x, (2, 3), (2, 1), (1, 1), count_include_pad=False), {}),
    (lambda n, x: F.avg_pool2d(x, 4, 3, 1, ceil_mode=True), {}),
    (lambda n, x: F.pad(x, (2, -1, 0, 3), value=0.5), {}),
    (lambda n, x: F.pad(x, (-3, 4)), {}),
    (lambda n, x: x[:, :, 1:], {}),
    (lambda n, x: x[..., :-2], {}),
    (lambda n, x: x[:, :, -5:-1], {}),
    (lambda n, x: x[..., 1::3], {}),
    (lambda n, x: F.pixel_shuffle(x, 2), {}),
    (lambda n, x: F.interpolate(x, size=(4, 21)), {}),
    (lambda n, x: F.interpolate(x, scale_factor=(1.1, 2.3)), {}),
    (lambda n, x: F.interpolate(x, size=(13, 5), mode="nearest-exact"), {}),
    (lambda n, x: F.interpolate(x, size=(13, 5), mode="bilinear"), {}),
    (lambda n, x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), {}),
    (lambda n, x: F.interpolate(x, (13, 1), mode="bilinear", align_corners=True), {}),
]


@pytest.mark.parametrize("case", range(len(WINDOWED)))
def test_output_of_a_tile_reads_no_pixel_outside_its_need(case):
    forward, parts = WINDOWED[case]
    graph = traced(forward, **parts)
    [axes] = [axes for node in graph.nodes if (axes := window_axes_of(node, graph)) is not None]
    net = copy.deepcopy(Net(forward, **parts)).double().requires_grad_(False)
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    expected = net(x)
    for grid in ((2, 2), (3, 1), (1, 4), (11, 2)):
        for tile in range(grid[0] * grid[1]):
            r0, r1, c0, c1 = own = own_rect(expected.shape[2:], grid, tile)
            top, bottom, left, right = need_of(axes, own)
            poisoned = torch.full_like(x, torch.nan)
            poisoned[:, :, top:bottom, left:right] = x[:, :, top:bottom, left:right]
            made = net(poisoned)[:, :, r0:r1, c0:c1]
            assert torch.equal(made, expected[:, :, r0:r1, c0:c1])


REFUSED: dict[str, tuple[Forward, dict[str, Any]]] = {
    "flatten": (lambda n, x: x.flatten(1), {}),
    "permute": (lambda n, x: x.permute(0, 2, 3, 1), {}),
    "select": (lambda n, x: x[:, :, 0], {}),
    "cat": (lambda n, x: torch.cat([x, x], dim=2), {}),
    "_safe_softmax": (lambda n, x: torch.ops.aten._safe_softmax(x, 3), {}),
    "topk": (lambda n, x: x.topk(2, 2)[0], {}),
    "argmax": (lambda n, x: x.argmax(), {}),
    "argmax of channels": (lambda n, x: x.flatten(1).argmax(1), {}),
    "conv2d": (lambda n, x: F.conv2d(x, x[:, :, :1, :1]), {}),
    "add": (lambda n, x: x[..., :4, :4] + x[..., :4, :4].transpose(2, 3), {}),
    "sum": (lambda n, x: x.sum((2, 3), dtype=torch.float64), {}),
    "layer_norm": (lambda n, x: n.op(x), {"op": nn.LayerNorm(8)}),
    "linalg_vector_norm": (lambda n, x: x.norm(torch.inf, (2, 3)), {}),
    "linear": (lambda n, x: n.op(x), {"op": nn.Linear(8, 8)}),
    "pad": (lambda n, x: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)), {}),
    "roll": (lambda n, x: x.roll(1), {}),
    "max_pool2d_with_indices": (lambda n, x: F.max_pool2d(x, 2, return_indices=True)[0], {}),
    "gather": (lambda n, x: x.gather(2, x[:, :, :2].argsort(1)), {}),
    "index": (lambda n, x: x[:, :, [2, 0]], {}),
    "multinomial": (lambda n, x: torch.multinomial(x.exp().mean(1).flatten(1), 2) * 1.0, {}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_operation_without_rule_is_named(kind):
    forward, parts = REFUSED[kind]
    _, findings = tiled(traced(forward, **parts))
    [finding] = findings
    assert finding.severity == "error"
    assert re.fullmatch(rf"tiles cannot divide \S+ \({kind.split()[0]}: .+\).*; .+", finding.text)


@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        ("rrelu", lambda n, x: F.rrelu(x, training=True)),
        ("binomial", lambda n, x: x + torch.binomial(x.detach().abs(), 0.5 + 0 * x.detach())),
        ("lstm", lambda n, x: n.op(x)[0]),
    ],
)
def test_random_numbers_behind_the_global_pool_are_drawn_by_all_tiles_alike(kind, forward):
    op = nn.LSTM(4, 8, num_layers=2, dropout=0.3)
    stage, findings = tiled(traced(lambda n, x: forward(n, x.mean((2, 3))), op=op))
    assert not findings
    assert {"tiled": 0, "whole": 1}[stage.layout[[*stage.layout][-1]]]


def test_rule_that_fails_names_the_node_and_the_cause():
    # It ended in an IndexError of the planner's own, without the operator.
    graph = traced(lambda n, x: x.permute(0, 2, 3, 1).relu())
    graph.nodes[0].args["dims"] = [0, 2, 3, 7]
    with pytest.raises(PlanError, match=r"permute.*IndexError"):
        tiled(graph)


def test_rule_that_makes_another_shape_than_torch_is_not_used():
    graph = traced(lambda n, x: x.permute(0, 2, 3, 1).relu() + 1)
    graph.nodes[0].args["dims"] = [0, 3, 2, 1]
    _, findings = tiled(graph)
    assert any("permute" in finding.text for finding in findings)


OPERATORS = {
    "nearest": "upsample_nearest2d",
    "nearest-exact": "_upsample_nearest_exact2d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
}


LENGTHS = (1, 2, 3, 7, 13, 40)
TARGETS = (1, 2, 3, 6, 14, 27, 41, 80)
FACTORS = (0.3, 2 / 3, 0.9, 1.0, 1.1, 1.5, 2.3)


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


def check_rows(length: int, **how: Any) -> None:
    """Compares what a row of the result is made of with PyTorch's own result."""
    axis = axis_of(length, **how)
    made = [sum(row * part for row, part in axis.taps(out)) for out in range(axis.size_out)]
    for order in (torch.channels_last, torch.contiguous_format):
        expected = F.interpolate(column(length, order), **how)
        assert made == pytest.approx(expected[0, 0, :, 0].tolist(), abs=1e-12)


# Nearest was computed in double precision, and without PyTorch's special cases: an image of 2 rows
# enlarged by 1.1 keeps its rows, one enlarged to 41 takes row 0 for row 20, which lies halfway.
@pytest.mark.parametrize("mode", [*OPERATORS])
def test_sources_for_every_size_and_scale_factor(mode):
    for length in LENGTHS:
        for target in TARGETS:
            check_rows(length, size=(target, 2), mode=mode)
        for factor in FACTORS:
            if int(length * factor) > 0:
                check_rows(length, scale_factor=(factor, 1.0), mode=mode)
                check_rows(
                    length, scale_factor=(factor, 1.0), mode=mode, recompute_scale_factor=True
                )


@pytest.mark.parametrize("how", ["align_corners", "antialias"])
def test_sources_with_aligned_corners_and_of_smooth_scaling(how):
    for length, mode in itertools.product(LENGTHS, ("bilinear", "bicubic")):
        for target in TARGETS if mode == "bilinear" or how == "antialias" else (19,):
            check_rows(length, size=(target, 2), mode=mode, **{how: True})
        check_rows(length, scale_factor=(2.3, 1.0), mode=mode, **{how: True})
