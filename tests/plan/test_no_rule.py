"""Operations that tiles cannot compute are named, never computed wrongly."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.core.errors import PlanError
from hires.plan.plan import Stage
from tests.helpers.tiny_nets import Forward, lay_out, tiled, traced

REFUSED: dict[str, tuple[Forward, dict[str, Any]]] = {
    "flatten": (lambda n, x: x.flatten(1), {}),
    "permute": (lambda n, x: x.permute(0, 2, 3, 1), {}),
    "select": (lambda n, x: x[:, :, 0], {}),
    "cat": (lambda n, x: torch.cat([x, x], dim=2), {}),
    "_safe_softmax": (lambda n, x: torch.ops.aten._safe_softmax(x, 3), {}),
    "topk": (lambda n, x: x.topk(2, 2)[0], {}),
    "argmax": (lambda n, x: x.argmax(), {}),
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
    assert re.fullmatch(rf"tiles cannot divide \S+ \({kind}: .+\).*; .+", finding.text)


def test_tiles_as_weight_are_refused():
    _, findings = tiled(traced(lambda n, x: F.conv2d(x, x), shape=(2, 2, 1, 1)))
    assert "(conv2d: " in findings[0].text


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


def test_layers_without_dropout_behind_the_global_pool_are_computed_by_all_tiles():
    _, findings = tiled(traced(lambda n, x: n.op(x.mean((2, 3)))[0], op=nn.LSTM(4, 8, 2)))
    assert not findings


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


def test_other_operators_of_the_same_reason_are_named_once():
    graph = traced(lambda n, x: x.flip(2) + x.rot90(2, (2, 3)) + x.cumsum(2).flip(3))
    _, [finding] = tiled(graph)
    reason = "reads the order of the pixels"
    assert f"flip (flip: {reason}) and 3 more for the same reason (rot90, " in finding.text


def test_pixels_in_other_dims_are_the_reason_of_a_sum():
    _, [finding] = tiled(traced(lambda n, x: x + x.transpose(2, 3), (2, 4, 8, 8)))
    assert "add (add: its operands have their rows and columns in other dims)" in finding.text


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


def test_one_tile_computes_everything():
    stage, findings = tiled(traced(deep, **DEEP), tiles=(1, 1))
    assert not findings
    assert not stage.comm
    assert set(stage.layout.values()) == {"whole"}


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
