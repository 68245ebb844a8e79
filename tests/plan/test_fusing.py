"""One exchange for several layers: what tiles hold, and where they still meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from hires.plan.graph import Graph
from hires.plan.plan import CommOp, Stage
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.tiny_nets import Forward, lay_out, traced


def fused(forward: Forward, fuse: int, **parts: Any) -> Stage:
    """The stage of a network on images of 12x8 in two rows of tiles."""
    graph = traced(forward, (2, 4, 12, 8), **parts)
    stage = Stage(0, 0, len(graph.nodes), [2, 1], 0)
    assert not lay_out(graph, [stage], fuse)
    return stage


def halos(stage: Stage) -> list[CommOp]:
    return [op for op in stage.comm if op.kind == "halo"]


def convs(*names: str, **how: Any) -> dict[str, nn.Module]:
    return {name: nn.Conv2d(4, 4, 3, padding=1, **how) for name in names}


def chain(n: Any, x: Tensor) -> Tensor:
    return n.pool(n.d(n.c(F.relu(n.b(n.a(x))))))


CHAIN = {**convs("a", "b", "c", "d"), "pool": nn.AdaptiveAvgPool2d(1)}


def test_chain_exchanges_once_for_every_so_many_layers():
    expected = {
        1: [("a", 1), ("b", 1), ("c", 1), ("d", 1)],
        2: [("a", 2), ("c", 2)],
        3: [("a", 3), ("d", 1)],
        4: [("a", 4)],
    }
    for fuse, exchanges in expected.items():
        found = halos(fused(chain, fuse, **CHAIN))
        # Tile 1 sends its first rows to tile 0.
        rows = [next(m[3] - m[2] for m in op.messages if m[0] == 1) for op in found]
        assert list(zip([op.node for op in found], rows, strict=True)) == exchanges


def test_values_between_two_exchanges_are_held_as_wide_as_the_next_layers_need():
    stage = fused(chain, 3, **CHAIN)
    assert stage.extents == {
        "a": [[0, 8, 0, 8], [4, 12, 0, 8]],
        "b": [[0, 7, 0, 8], [5, 12, 0, 8]],
        "relu": [[0, 7, 0, 8], [5, 12, 0, 8]],
    }


def residual(n: Any, x: Tensor) -> Tensor:
    for first, second in ((n.a, n.b), (n.c, n.d)):
        x = F.relu(x + second(F.relu(first(x))))
    return n.pool(x)


def test_both_branches_of_a_residual_block_start_from_the_pixels_of_one_exchange():
    # Three layers would fit, but within a block two values are alive.
    for fuse in (2, 3):
        assert [op.node for op in halos(fused(residual, fuse, **CHAIN))] == ["a", "c"]
    [whole] = halos(fused(residual, 4, **CHAIN))
    assert whole.readers == ["a", "add"]


def test_no_single_value_to_exchange_falls_back_on_what_the_layer_reads():
    def forward(n: Any, x: Tensor) -> Tensor:
        return n.pool(n.d(n.c(n.b(n.a(x)))) + x)

    found = halos(fused(forward, 2, **CHAIN))
    assert [(op.node, op.value) for op in found] == [("a", "input"), ("c", "b")]


def test_values_that_leave_the_stage_are_not_held_wider():
    graph = traced(chain, (2, 4, 12, 8), **CHAIN)
    cut = graph.position["c"]
    stages = [Stage(0, 0, cut, [2, 1], 0), Stage(1, cut, len(graph.nodes), [2, 1], 2)]
    assert not lay_out(graph, stages, 4)
    assert [op.node for stage in stages for op in halos(stage)] == ["a", "c"]
    assert set(stages[0].extents) == {"a"}
    assert set(stages[1].extents) == {"c"}


def test_image_with_fewer_rows_than_tiles_holds_nothing_twice():
    def forward(n: Any, x: Tensor) -> Tensor:
        return n.pool(n.b(n.a(x)))

    graph = traced(forward, (2, 4, 3, 8), **CHAIN)
    stage = Stage(0, 0, len(graph.nodes), [4, 1], 0)
    assert not lay_out(graph, [stage], 2)
    assert not stage.extents
    assert [op.node for op in halos(stage)] == ["a", "b"]


def messages(model: dict[str, Any], fuse: int) -> int:
    config = config_of(
        image=[128, 96], model=model, parallel={"tiles": [2, 2], "halo": {"fuse": fuse}}
    )
    plan = plan_of(config)
    assert plan.ok, plan.findings
    return int(plan.totals["by_kind"]["halo"]["messages"])


@pytest.mark.parametrize("depth", [18, 50])
def test_fewer_messages_with_every_layer_more(depth: int):
    counts = [messages({"name": "resnet", "depth": depth, "classes": 4}, f) for f in (1, 2, 4)]
    assert counts[0] > 1.5 * counts[1] > 1.5 * counts[2]


def test_graph_of_one_tile_is_left_alone():
    graph: Graph = traced(chain, (2, 4, 12, 8), **CHAIN)
    stage = Stage(0, 0, len(graph.nodes), [1, 1], 0)
    lay_out(graph, [stage], 3)
    assert not stage.extents
    assert not stage.comm
