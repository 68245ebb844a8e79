"""What tiles say to each other, and what stages hand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.plan.plan import CommOp, Edge, Plan
from hires.plan.planner import make_plan
from hires.plan.program import edge_messages, halo_messages
from tests.helpers.small_plans import IMAGE, config_of, plan_of
from tests.helpers.tiny_nets import Forward, traced


def planned(forward: Forward, parallel: dict[str, Any], **parts: Any) -> Plan:
    """The plan of a small network on two images of 13x10."""
    plan = make_plan(config_of("train", 2, **parallel), traced(forward, (2, 3, *IMAGE), **parts))
    assert plan.ok, plan.findings
    return plan


def said(plan: Plan, stage: int = 0) -> list[tuple[str, str, int, bool]]:
    """(node, kind, elements, travels back) of a stage's communication."""
    return [(op.node, op.kind, op.elements, op.back) for op in plan.stages[stage].comm]


def edge(plan: Plan, value: str) -> Edge:
    [found] = [edge for edge in plan.edges if edge.value == value]
    return found


def gated(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.norm(n.conv(x))
    gate = n.gate(x.mean((2, 3), keepdim=True))
    return n.fc((n.last(x) * gate).mean((2, 3)))


GATED = {
    "conv": nn.Conv2d(3, 4, 3, padding=1),
    "norm": nn.BatchNorm2d(4),
    "gate": nn.Conv2d(4, 4, 1),
    "last": nn.Conv2d(4, 4, (1, 3), padding=(0, 1)),
    "fc": nn.Linear(4, 5),
}


def test_communication_of_a_stage_in_its_order():
    assert said(planned(gated, {"tiles": [2, 1]}, **GATED)) == [
        ("conv", "halo", 0, False),  # of the images, which have no gradient
        ("norm", "norm", 2 * 4, True),
        ("mean", "reduce", 2 * 4, False),
        # No halo before `last`: it is one row high. The gate's gradient is a part on each tile.
        ("mul", "share", 2 * 4, True),
        ("mean_1", "reduce", 2 * 4, False),
    ]


def test_halo_is_one_row_or_column_from_each_side():
    [rows, cols] = (
        planned(gated, {"tiles": tiles}, **GATED).stages[0].comm[0] for tiles in ([2, 1], [1, 2])
    )
    assert rows.messages == [[1, 0, 7, 8, 0, 10], [0, 1, 6, 7, 0, 10]]
    assert cols.messages == [[1, 0, 0, 13, 5, 6], [0, 1, 0, 13, 4, 5]]


def test_halo_gradients_take_the_way_back_of_the_halo():
    plan = plan_of(tiles=[3, 1])
    op = next(op for op in plan.stages[0].comm if op.node == "conv3")
    for rank in range(3):
        sends, receives = halo_messages(plan, rank, 0, op, back=False)
        back_sends, back_receives = halo_messages(plan, rank, 0, op, back=True)
        assert [(m.peer, m.rect) for m in back_sends] == [(m.peer, m.rect) for m in receives]
        assert [(m.peer, m.rect) for m in back_receives] == [(m.peer, m.rect) for m in sends]


def test_one_tile_says_nothing():
    assert said(planned(gated, {}, **GATED)) == []


def test_untiled_batch_norm_in_inference_says_nothing():
    kinds = {op.kind for op in plan_of("infer", tiles=[2, 1]).stages[0].comm}
    assert "norm" not in kinds


def test_image_of_logits_sums_its_loss_over_the_tiles():
    plan = planned(lambda n, x: n.conv(x), {"tiles": [2, 1]}, conv=nn.Conv2d(3, 5, 1))
    assert plan.stages[0].comm == [CommOp("conv", "loss", "conv", elements=2)]


ALL = (0, 2, 0, 1, 0, 1)
"""Both samples of a value without pixels."""


def test_tiles_join_onto_one_rank_and_gradients_take_the_way_back():
    plan = planned(gated, {"tiles": [2, 1], "stages": 2, "balance": [3, 1]}, **GATED)
    # The cut before fc is behind the pool: every tile holds the complete value.
    mean = edge(plan, "mean_1")
    assert (mean.source, mean.target, mean.whole) == (0, 1, True)
    assert mean.messages == [[0, 0, *ALL]]
    assert mean.back == [[0, 0, *ALL], [1, 0, *ALL]]

    plan = planned(gated, {"tiles": [2, 1], "stages": 2, "balance": [1, 3]}, **GATED)
    norm = edge(plan, "norm")
    assert not norm.whole
    assert norm.messages == norm.back == [[0, 0, 0, 2, 0, 7, 0, 10], [1, 0, 0, 2, 7, 13, 0, 10]]


def test_tiles_hand_whole_values_to_their_successors():
    keys = {"tiles": [1, 2], "stages": 2, "spatial_stages": 2, "balance": [2, 2]}
    plan = planned(gated, keys, **GATED)
    gate = edge(plan, "gate")
    assert gate.whole
    assert gate.messages == gate.back == [[0, 0, *ALL], [1, 1, *ALL]]
    assert edge(plan, "norm").messages == [[0, 0, 0, 2, 0, 13, 0, 5], [1, 1, 0, 2, 0, 13, 5, 10]]
    # The gate is used with tiles in stage 1 only, so its gradient is summed there.
    assert ("mul", "share", 2 * 4, True) in said(plan, 1)


def test_skip_goes_straight_to_each_stage_that_reads_it():
    plan = plan_of(stages=7)
    found = [(e.value, e.source, e.target) for e in plan.edges]
    assert found == [
        ("relu", 0, 1),
        ("conv2", 1, 2),
        ("mul", 2, 3),
        ("relu_1", 3, 4),
        ("relu", 0, 4),  # past the stages between
        ("cat", 4, 5),
        ("mean_1", 5, 6),
    ]


def test_stage_that_reads_the_images_gets_no_message_of_them():
    def forward(n: Any, x: torch.Tensor) -> torch.Tensor:
        return n.fc((n.conv(x)[:, :3] + x).mean((2, 3)))

    parts = {"conv": nn.Conv2d(3, 4, 3, padding=1), "fc": nn.Linear(3, 5)}
    plan = planned(forward, {"stages": 2}, **parts)
    assert [e.value for e in plan.edges] == ["mean"]


@pytest.mark.parametrize("action", ["F0", "B0"])
def test_both_sides_agree_on_every_message_between_stages(action):
    plan = plan_of(tiles=[2, 2], stages=4, spatial_stages=2, replicas=2)
    sent, received = (
        {
            (*((rank, m.peer) if outgoing else (m.peer, rank)), m.tag, m.rect, m.shape)
            for rank in range(plan.world)
            for m in edge_messages(plan, rank, action, outgoing)
        }
        for outgoing in (True, False)
    )
    assert sent
    assert sent == received
    assert len({(source, target, tag) for source, target, tag, _, _ in sent}) == len(sent)
    size = plan.ranks_per_replica
    assert {(source // size, target // size) for source, target, *_ in sent} == {(0, 0), (1, 1)}


def test_value_that_holds_no_gradient_is_not_answered():
    def forward(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.a(x)
        return n.fc((n.b(x) + F.relu(x).detach()).mean((2, 3)))

    parts = {name: nn.Conv2d(3, 3, 1) for name in "ab"} | {"fc": nn.Linear(3, 5)}
    plan = planned(forward, {"stages": 2, "balance": [1, 2]}, **parts)
    assert {e.value: bool(e.back) for e in plan.edges} == {"a": True}
