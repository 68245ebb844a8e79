"""Which operations tiles can compute; the others are named, never computed wrongly."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import PlanError
from hires.plan.plan import Stage
from hires.plan.rules import rule_in, window_axes_of
from hires.plan.tiling import need_of, own_rect
from tests.helpers.tiny_nets import Forward, Net, lay_out, tiled, traced


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


def test_whole_value_is_cropped_where_it_is_concatenated_to_tiles():
    forward = lambda n, x: torch.cat([F.avg_pool2d(x, 9), x.mean((2, 3), keepdim=True)], 1)  # noqa: E731
    stage, findings = tiled(traced(forward, shape=(2, 4, 9, 9)))
    assert not findings
    assert stage.layout["mean.crop0"] == stage.layout["cat"] == "tiled"


def deep(n: Any, x: torch.Tensor) -> torch.Tensor:
    for step in (n.a, n.turn1, n.b, n.turn2, n.c):
        x = step(x)
    return n.fc(x.flatten(1))


class Upside(nn.Module):
    """Turns maps upside down."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(2)


DEEP = {
    **{name: nn.Conv2d(4, 4, 3, padding=1) for name in "abc"},
    **{name: Upside() for name in ("turn1", "turn2")},
    "fc": nn.Linear(4 * 72, 3),
}


def test_one_finding_names_the_first_of_each_kind_and_one_remedy():
    graph = traced(deep, **DEEP)
    _, [finding] = tiled(graph)
    assert finding.text == (
        "tiles cannot divide turn1 (flip: reads the order of the pixels) and 1 more of its kind, "
        "fc (linear: multiplies along rows or columns); turn1 belongs to the first layer, so this "
        "network cannot begin with tiles; use parallel.gather=auto"
    )


def test_finding_in_a_later_stage_names_the_join_before_it():
    graph = traced(deep, **DEEP | {"turn1": nn.Identity(), "turn2": nn.Identity()})
    first = graph.position["c"]
    one = Stage(0, 0, first, [2, 1], 0)
    two = Stage(1, first, len(graph.nodes), [2, 1], 2, first_layer="c")
    finding = lay_out(graph, [one, two])[-1]
    assert finding.key == "parallel.spatial_stages"
    assert finding.text == (
        "tiles cannot divide fc (linear: multiplies along rows or columns); "
        "parallel.spatial_stages=1 joins the tiles before stage 1 (it begins at c)"
    )


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
