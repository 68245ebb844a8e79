"""Which ranks hold what, what tiles exchange, what stages hand on, and who is in which group."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

from hires.plan.groups import (
    gradient_group,
    groups,
    held_stages,
    num_holders,
    tile_group,
)
from hires.plan.layout import edge_of, held_by
from hires.plan.plan import Box, Plan, Stage, Transfer
from hires.plan.planner import make_plan
from hires.plan.program import halo_messages
from hires.plan.rules import SHARDED, TILED, WHOLE
from tests.helpers.graphs import graph_of, node
from tests.helpers.small_plans import IMAGE, config_of, plan_of
from tests.helpers.tiny_nets import Forward, traced


def planned(forward: Forward, parallel: dict[str, Any], **parts: Any) -> Plan:
    """The plan of a small network on two images of 13x10."""
    plan = make_plan(config_of("train", 2, **parallel), traced(forward, (2, 3, *IMAGE), **parts))
    assert plan.ok, plan.findings
    return plan


def gated(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.norm(n.conv(x))
    gate = n.gate(x.mean((2, 3), keepdim=True))
    return n.fc((n.last(x) * gate).mean((2, 3)))


def test_communication_of_a_stage_in_its_order():
    parts = {
        "conv": nn.Conv2d(3, 4, 3, padding=1), "norm": nn.BatchNorm2d(4),
        "gate": nn.Conv2d(4, 4, 1), "last": nn.Conv2d(4, 4, (1, 3), padding=(0, 1)),
        "fc": nn.Linear(4, 5),
    }  # fmt: skip
    [stage] = planned(gated, {"tiles": [2, 1]}, **parts).stages
    assert [(op.node, op.kind, op.elements, op.back) for op in stage.comm] == [
        ("conv", "halo", 0, False),  # of the images, which have no gradient
        ("norm", "norm", 2 * 4, True),
        ("mean", "reduce", 2 * 4, False),
        # No halo before `last`: it is one row high. The gate's gradient is a part on each tile.
        ("mul", "share", 2 * 4, True),
        ("mean_1", "reduce", 2 * 4, False),
    ]


def test_halo_gradients_take_the_way_back_of_the_halo():
    plan = plan_of(tiles=[3, 1])
    op = next(op for op in plan.stages[0].comm if op.node == "conv3")
    for rank in range(3):
        (sends, receives), back = (
            halo_messages(plan, rank, 0, "F0", 1, op, way) for way in (False, True)
        )
        there = [[(m.peer, m.rect) for m in side] for side in (receives, sends)]
        assert [[(m.peer, m.rect) for m in side] for side in back] == there


SHAPE = [4, 2, 7, 5]
GEMS: dict[str, Any] = {"directions": 2, "schedule": "gems"}

SIDES = (
    ([1, 1], 1, WHOLE),
    ([2, 2], 1, TILED),
    ([1, 3], 1, TILED),
    ([1, 1], 2, SHARDED),
    ([1, 1], 3, SHARDED),
    ([3, 1], 1, WHOLE),  # tiles that hold all
)
"""Tiles, shards and layout of a stage."""


def cut(box: Box) -> tuple[slice, ...]:
    """Returns the slices of the whole value that a box stands for."""
    r0, r1, c0, c1 = box.rect or (0, 7, 0, 5)
    return np.s_[box.n0 : box.n1, :, r0:r1, c0:c1]


def arrivals(
    messages: list[Transfer], side: int, senders: list[Box], count: int
) -> list[np.ndarray]:
    """How often each number comes to each rank of a side; senders must hold what they send."""
    came = [np.zeros(SHAPE) for _ in range(count)]
    for *ends, box in messages:
        mask = np.zeros(SHAPE)
        mask[cut(senders[ends[1 - side]])] = 1
        assert mask[cut(box)].all()
        came[ends[side]][cut(box)] += 1
    return came


def test_every_number_arrives_once_and_its_gradient_returns_once():
    graph = graph_of(node("v", "relu", ["input"], SHAPE), image=(4, 2, 7, 5))
    for sides in itertools.product(SIDES, SIDES):
        makes, reads = (
            Stage(index, index, index + 1, [*tiles], 0, shards, layout={"v": layout})
            for index, (tiles, shards, layout) in enumerate(sides)
        )
        edge = edge_of(graph, "v", makes, reads, back=True)
        wanted, held = held_by(graph, reads, "v"), held_by(graph, makes, "v")
        there = arrivals(edge.messages, 1, held, len(wanted))
        back = arrivals(edge.back, 0, wanted, len(held))
        for came, boxes in ((there, wanted), (back, held)):
            for count, box in zip(came, boxes, strict=True):
                expected = np.zeros(SHAPE)
                expected[cut(box)] = 1
                assert (count == expected).all(), sides


def test_directions_have_tile_groups_of_their_own_and_share_the_gradient_groups():
    plan = plan_of(tiles=[2, 1], stages=2, replicas=2)
    assert groups(plan) == [
        *([0, 1], [2], [3, 4], [5]),  # the tiles of each replica and stage
        *([0, 1, 3, 4], [2, 5]),  # all that hold a stage
    ]
    assert [tile_group(plan, rank) for rank in range(6)] == [0, 0, 1, 2, 2, 3]
    assert [gradient_group(plan, stage) for stage in range(2)] == [4, 5]
    plan = plan_of(**GEMS, tiles=[2, 1], stages=2)
    assert groups(plan) == [
        *([0, 1], [2], [1, 2], [0]),  # down, then up: the mirror image
        *([0, 1, 2], [0, 2]),
    ]
    assert gradient_group(plan, 0) == 4
    assert [tile_group(plan, 0, direction) for direction in range(2)] == [0, 3]
    assert [held_stages(plan, rank) for rank in range(3)] == [[0, 1], [0], [0, 1]]
    assert [num_holders(plan, stage) for stage in range(2)] == [3, 2]
    # The middle rank of an odd number of stages is once in its group.
    plan = plan_of(**GEMS, stages=3)
    assert [groups(plan)[gradient_group(plan, n)] for n in range(3)] == [[0, 2], [1], [0, 2]]


def test_figure_3_3_of_the_thesis_4_tiles_and_2_model_parts_in_both_directions():
    plan = plan_of(**GEMS, tiles=[2, 2], stages=2)
    grids = [
        [[plan.rank_of(0, way, s.index, tile) for tile in range(s.num_ranks)] for s in plan.stages]
        for way in range(2)
    ]
    # Model 1:  0 1 / 2 3  >  4;  model 2:  4 3 / 2 1  >  0
    assert grids == [[[0, 1, 2, 3], [4]], [[4, 3, 2, 1], [0]]]
    # The thesis forbids it: ranks 1 to 3 have tiles of both. They have an order, so it runs.
    assert plan.verdict.startswith("deadlock-free")
