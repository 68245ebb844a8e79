"""Where tiles and shards gather a value, and where they crop it to tiles again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.plan.groups import sent_as
from hires.plan.plan import Box, Plan, Transfer
from hires.plan.planner import make_plan
from tests.helpers.small_plans import IMAGE, by_kind, config_of
from tests.helpers.tiny_nets import Forward, traced


def planned(forward: Forward, task: str = "train", tiles: Any = (2, 1), **parts: Any) -> Plan:
    """The plan of a small network on two images of 13x10."""
    config = config_of(task, 2, tiles=list(tiles))
    plan = make_plan(config, traced(forward, (2, 3, *IMAGE), task == "train", **parts))
    assert plan.ok, plan.findings
    return plan


def ways(plan: Plan) -> list[str]:
    """Every node of the first stage and how its value lies."""
    return [f"{node.name} {plan.stages[0].layout[node.name]}" for node in plan.nodes(0)]


def comm_of(plan: Plan) -> list[tuple[str, str, bool]]:
    return [(op.node, op.kind, op.back) for op in plan.stages[0].comm]


CONV = {"conv": nn.Conv2d(3, 5, 1)}


def test_node_without_a_rule_is_computed_whole_until_a_convolution_reads_it():
    last = nn.Conv2d(5, 5, 1)
    plan = planned(lambda n, x: n.last(F.relu(n.conv(x).flip(2))), **CONV, last=last)
    # Cropped at once: the convolution behind the ReLU is worth it.
    assert ways(plan) == [
        *("conv tiled", "conv.gather0 whole", "flip whole"),
        *("flip.crop0 tiled", "relu tiled", "last tiled"),
    ]
    gather, crop, _ = plan.stages[0].comm
    assert comm_of(plan) == [
        ("conv.gather0", "gather", False),
        ("flip.crop0", "crop", True),
        ("last", "loss", False),
    ]
    # Each tile gets what the other holds, and of the gradient the same.
    first, second = (Box(0, 2, rect) for rect in ((0, 7, 0, 10), (7, 13, 0, 10)))
    assert gather.messages == [Transfer(1, 0, second), Transfer(0, 1, first)]
    assert crop.messages == [Transfer(0, 1, second), Transfer(1, 0, first)]
    # One gather serves all readers, and the tiles stay.
    plan = planned(lambda n, x: (y := n.conv(x)).flip(2) + y.flip(3) + y, tiles=(2, 2), **CONV)
    assert [line for line in ways(plan) if "." in line] == ["conv.gather0 whole", "add.crop0 tiled"]
    assert ways(plan)[-1] == "add_1 tiled"


def test_parameter_with_rows_or_columns_is_cropped():
    # A position embedding passed for pointwise, although no tile has a parameter of its size.
    for shape in ((1, 5, 13, 10), (5, 13, 1), (10,)):
        position = nn.Parameter(torch.ones(shape))
        plan = planned(lambda n, x: n.conv(x) + n.position, tiles=(2, 2), position=position, **CONV)
        assert plan.stages[0].layout["add"] == "tiled"
        assert plan.graph.by_name["position.crop0"].shape[-2:] == list(IMAGE)
        # Nothing travels but the gradient of a whole value that is made from the parameter.
        kinds = ["loss"] if shape[-2:] == IMAGE else ["crop", "loss"]
        assert [op.kind for op in plan.stages[0].comm] == kinds


def test_indices_travel_in_their_own_type():
    plan = planned(lambda n, x: n.conv(x) * (n.conv(x) > 0).flip(2), **CONV)
    [gather] = [op for op in plan.stages[0].comm if op.kind == "gather"]
    assert plan.dtype_of(gather.value) == "bool"
    assert sent_as(replace(plan, codecs={"halo": "bf16"}), gather.value, "gather") == ("bool", "")
    assert by_kind(plan)["gather"][1] == 2 * 5 * 13 * 10


ACROSS: dict[str, Forward] = {
    "roll": lambda n, x: x.roll(1, 0),
    "roll of all dims": lambda n, x: x.roll(37),
    "roll of a volume": lambda n, x: x.unsqueeze(2).roll(1, -5).squeeze(2),
    "pad": lambda n, x: F.pad(x, (0, 0, 0, 0, 0, 0, 1, -1)),
    "layer norm": lambda n, x: F.layer_norm(x, x.shape),
    "rms norm": lambda n, x: F.rms_norm(x, x.shape),
    "list of samples": lambda n, x: x[[1, 0, 2, 3]],
    "order of samples": lambda n, x: x.sort(0)[0],
    "number of each sample": lambda n, x: x * n.each,
    "computed number": lambda n, x: x * n.each.exp(),
    "multinomial": lambda n, x: x * torch.multinomial(x.detach().abs().mean((2, 3)), 1)[0],
}


APART: dict[str, Forward] = {
    "roll of channels": lambda n, x: x.roll((1, 2), (1, -1)),
    "pad of a sample": lambda n, x: F.pad(x, (0, 1, 0, 0, 1, 0)),
    "slice": lambda n, x: x[:, :5, ::2],
    "bins": lambda n, x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True)[0],
    "layer norm of a sample": lambda n, x: F.layer_norm(x, x.shape[1:]),
    "two maps": lambda n, x: torch.max(x, x.flip(1)) - torch.min(x, 2 * x),
    "channels": lambda n, x: x * x[:, [2, 0]].gather(1, x.argmax(1, keepdim=True) % 2),
    "tiles of channels": lambda n, x: torch.tile(x, (1, 2, 1, 1)).repeat_interleave(2, 1),
    "top": lambda n, x: x * x.topk(1, 1)[0] * x.flatten(2).max(-1)[0][..., None, None],
}


@pytest.mark.parametrize("forwards", [ACROSS, APART], ids=["across", "apart"])
def test_shards_gather_only_what_moves_or_mixes_samples(forwards):
    each = nn.Parameter(torch.ones(4, 1, 1, 1))
    for name, forward in forwards.items():
        graph = traced(lambda n, x: forward(n, n.conv(x)), (4, 3, *IMAGE), each=each, **CONV)  # noqa: B023
        plan = make_plan(config_of("train", 4, local_dp=2), graph)
        assert plan.ok, plan.findings
        gathers = "gather_tiles" in {node.kind for node in plan.graph.nodes}
        assert gathers == (forwards is ACROSS), name
