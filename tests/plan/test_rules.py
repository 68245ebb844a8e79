"""Which operations can tiles compute, and is what they ask for all that they need?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.plan.rules import rule_in, window_axes_of
from hires.plan.tiling import Axes, need_of, own_rect
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


# Every operation as a module and as a function: (module, the function of net and x).
TWINS: dict[str, tuple[nn.Module, Forward]] = {
    "conv2d": (
        nn.Conv2d(4, 6, 3, 2, 1, 2, groups=2),
        lambda n, x: F.conv2d(x, n.op.weight, n.op.bias, 2, 1, 2, 2),
    ),
    "conv_transpose2d": (
        nn.ConvTranspose2d(4, 2, 4, 3, 1, 1, dilation=2),
        lambda n, x: F.conv_transpose2d(x, n.op.weight, n.op.bias, 3, 1, 1, 1, 2),
    ),
    "max_pool2d": (nn.MaxPool2d(3, 2, 1), lambda n, x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool2d": (nn.AvgPool2d((2, 3)), lambda n, x: F.avg_pool2d(x, (2, 3))),
    "pad": (nn.ZeroPad2d((1, 2, 0, 3)), lambda n, x: F.pad(x, (1, 2, 0, 3))),
    "upsample_nearest2d": (
        nn.Upsample(scale_factor=1.5),
        lambda n, x: F.interpolate(x, scale_factor=1.5),
    ),
    "pixel_shuffle": (nn.PixelShuffle(2), lambda n, x: F.pixel_shuffle(x, 2)),
    "relu": (nn.ReLU(inplace=True), lambda n, x: F.relu(x)),
    "silu": (nn.SiLU(), lambda n, x: F.silu(x)),
    "prelu": (nn.PReLU(4), lambda n, x: F.prelu(x, n.op.weight)),
    "dropout": (nn.Dropout(0.0), lambda n, x: F.dropout(x, 0.0)),
    "softmax": (nn.Softmax(1), lambda n, x: F.softmax(x, 1)),
    "adaptive_avg_pool2d": (nn.AdaptiveAvgPool2d(1), lambda n, x: F.adaptive_avg_pool2d(x, 1)),
    "batch_norm": (
        nn.BatchNorm2d(4),
        lambda n, x: F.batch_norm(
            x, n.op.running_mean, n.op.running_var, n.op.weight, n.op.bias, True
        ),
    ),
}
POINTWISE = ("relu", "silu", "prelu", "dropout", "softmax")
KINDS = dict.fromkeys(POINTWISE, "pointwise") | {
    "adaptive_avg_pool2d": "reduce",
    "batch_norm": "norm",
}


@pytest.mark.parametrize("name", TWINS)
def test_modules_and_functions_have_the_same_rule(name):
    module, function = TWINS[name]
    as_module = rules(lambda n, x: n.op(x), op=module)
    assert as_module == rules(function, op=module)
    [(operation, kind, axes)] = as_module
    assert operation == name
    assert kind == KINDS.get(name, "window")
    assert (axes is not None) == (kind == "window")


def test_batch_norm_in_evaluation_needs_no_other_tile():
    [(_, kind, _)] = rules(lambda n, x: n.bn(x), training=False, bn=nn.BatchNorm2d(4))
    assert kind == "pointwise"


@pytest.mark.parametrize("drop", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()])
def test_dropout_in_evaluation_is_no_obstacle(drop):
    # Dropout2d is feature_dropout in ATen, which had no rule even where it does nothing.
    assert [kind for _, kind, _ in rules(lambda n, x: n.drop(x), False, drop=drop)] == ["pointwise"]


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


def test_gate_of_the_whole_image_multiplies_tiles():
    parts = {"gate": nn.Conv2d(4, 4, 1)}
    found = rules(lambda n, x: x * n.gate(x.mean((-2, -1), keepdim=True)), **parts)
    assert [kind for _, kind, _ in found] == ["reduce", "whole", "pointwise"]


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
    axes = axes_of(forward, parts)
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


def axes_of(forward: Forward, parts: dict[str, nn.Module]) -> Axes:
    """The axes of the only windowed node."""
    graph = traced(forward, **parts)
    [axes] = [axes for node in graph.nodes if (axes := window_axes_of(node, graph)) is not None]
    return axes
