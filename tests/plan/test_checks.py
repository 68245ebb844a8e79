"""What forbids a layout is said before anything starts: all of it, with keys that work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.core.errors import PlanError
from hires.core.schedules import timeline
from hires.plan.checks import check_residents
from hires.plan.groups import used_both_ways
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from tests.helpers import layouts
from tests.helpers.small_plans import IMAGE, config_of, plan_of
from tests.helpers.tiny_nets import Forward, traced


def errors(plan: Plan) -> list[tuple[str, str]]:
    """(key, text) of every error."""
    return [(f.key, f.text) for f in plan.findings if f.severity == "error"]


def planned(
    forward: Forward, task: str = "train", parallel: dict[str, Any] | None = None, **parts: Any
) -> Plan:
    """The plan of a small network on two images of 13x10."""
    graph = traced(forward, (2, 3, *IMAGE), task == "train", **parts)
    return make_plan(config_of(task, 2, **parallel or {}), graph)


def classify(n: Any, x: torch.Tensor) -> torch.Tensor:
    return n.fc(x.mean((2, 3)))


BOTH_WAYS = {"directions": 2, "schedule": "gems"}


@pytest.mark.parametrize(
    ("batch", "parallel", "expected"),
    [
        (10, {"microbatches": 4}, "use batch=8 or batch=12"),
        (1, {"replicas": 2}, "into 2 microbatches (parallel.replicas=2); use batch=2"),
        # What was offered did not divide into shards.
        (7, {"stages": 2, "replicas": 3, "local_dp": 5}, "local_dp=5 shards; use batch=15"),
    ],
)
def test_batch_that_does_not_divide(batch, parallel, expected):
    [(key, text)] = errors(plan_of(batch=batch, **parallel))
    assert key == "batch"
    assert text.startswith(f"batch={batch} does not divide into ")
    assert text.endswith(f"{expected}, or fewer microbatches")


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"tiles": [3, 1], "resident": 2}, "does not divide 3 ranks; use parallel.resident=1 or 3"),
        (
            {"tiles": [2, 1], "stages": 3, "resident": 2, **BOTH_WAYS},
            "gives a process a part of a stage beside others, and a sum over the stage would keep "
            "these from going on; use parallel.resident=1 or 4",
        ),
        (
            {"tiles": [3, 1], "stages": 2, "resident": 2},
            "use parallel.resident=1 or 4",
        ),
    ],
)
def test_ranks_that_one_process_cannot_hold(parallel, expected):
    [(key, text)] = errors(plan_of(batch=4, **parallel))
    assert key == "parallel.resident"
    assert text.startswith(f"parallel.resident={parallel['resident']} ")
    assert text.endswith(expected)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"task": {"name": "infer"}}, "task=infer keeps nothing for a backward pass"),
        ({"device": "cuda"}, "device=cuda has one rank for each GPU"),
        ({"optimizer": {"shard": True}}, "optimizer.shard=true divides the update among ranks"),
        (
            {"comm": {"gradient_order": "chain"}},
            "comm.gradient_order=chain begins sums before all ranks have their part",
        ),
        ({"engine": {"compile": "stage"}}, "engine.compile=stage compiles for one"),
    ],
)
def test_what_several_ranks_of_a_process_cannot_do(keys, reason):
    config = layouts.config_of(parallel={"tiles": [2, 1], "resident": 2}, **keys)
    [text] = [one.text for one in check_residents(config)]
    assert text.startswith("parallel.resident=2 ")
    assert f": {reason}; " in text


def test_more_stages_than_layers_and_a_balance_of_others():
    plan = plan_of(stages=8, tiles=[2, 2], spatial_stages=8)
    text = "parallel.stages=8 is more than the 7 layers of the network; use parallel.stages=7 or"
    assert errors(plan) == [("parallel.stages", f"{text} fewer")]
    assert (timeline(plan.pipeline, plan.schedule), plan.edges, plan.totals, plan.verdict) == (
        [""],
        [],
        {},
        "",
    )
    assert plan_of(stages=7).ok
    [(key, text)] = errors(plan_of(stages=2, balance=[3, 3]))
    assert key == "parallel.balance"
    assert text.endswith("has 7 layers; make it sum to 7, or leave it out")
    assert [stage.num_layers for stage in plan_of(stages=2, balance=[2, 5]).stages] == [2, 5]


def test_all_findings_come_at_once():
    plan = planned(
        lambda n, x: n.fc(n.conv(x.flip(2)).flatten(1))[:1],
        parallel={"tiles": [14, 1], "microbatches": 3, "gather": "never"},
        conv=nn.Conv2d(3, 3, 1),
        fc=nn.Linear(390, 5),
    )
    keys = [key for key, _ in errors(plan)]
    assert keys == ["batch", "parallel.tiles", "model", "parallel.gather"]
    with pytest.raises(PlanError, match=r"batch=2 .*flip.*linear"):
        plan.require_ok()


TIED = {"w": nn.Parameter(torch.ones(3, 3, 3, 3)), "fc": nn.Linear(3, 5)}


def twice(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.relu(F.conv2d(x, n.w, padding=1))
    return classify(n, F.conv2d(x, n.w, padding=1))


def test_tied_parameter_is_fine_within_a_stage_and_where_nothing_learns():
    [(key, text)] = errors(planned(twice, parallel={"stages": 3}, **TIED))
    assert key == "parallel.balance"
    assert text == (
        "used by stages 0 (conv2d (conv2d)) and 1 (conv2d_1 (conv2d)): w; use "
        "parallel.stages=2 or fewer, without parallel.balance"
    )
    assert planned(twice, parallel={"stages": 2, "balance": [2, 1]}, **TIED).ok
    # The cut that balances best would part them: it was made, and refused.
    assert planned(twice, parallel={"stages": 2}, **TIED).stages[0].num_layers == 2
    # Each stage may hold a copy that never changes; this was refused.
    assert planned(twice, "infer", {"stages": 3}, **TIED).ok
    frozen = {**TIED, "w": nn.Parameter(TIED["w"].detach(), requires_grad=False)}
    assert planned(twice, parallel={"stages": 3}, **frozen).ok


def test_parameter_of_tiles_and_of_the_whole_image_counts_its_whole_use_once():
    # Its gradient is a part on every tile from the one use and complete from the other, and the
    # sum over the tiles counted the second one once for each tile.
    def before_and_behind(n: Any, x: torch.Tensor) -> torch.Tensor:
        return n.fc(n.conv(n.conv(x).mean((2, 3), keepdim=True)).flatten(1))

    parts = {"conv": nn.Conv2d(3, 3, 1, bias=False), "fc": nn.Linear(3, 5)}
    plan = planned(before_and_behind, parallel={"tiles": [2, 1]}, **parts)
    assert plan.ok
    assert used_both_ways(plan, plan.stages[0]) == {"conv.weight"}


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda n, x: n.conv(x).flatten(2), "returns [2, 5, 130] for 2 images"),
        (lambda n, x: n.conv(x).mean((0, 2, 3)), "returns [5] for 2 images"),
        (lambda n, x: n.conv(x).mean((2, 3))[:1], "returns [1, 5] for 2 images"),
        (lambda n, x: n.conv(x).mean((2, 3))[:, 1:], "returns 4 classes, the data has 5"),
        (lambda n, x: n.conv(x).mean((2, 3)) > 0, "the network returns gt"),
        (lambda n, x: x.mean((2, 3)).repeat(1, 2), "no gradient flows"),
    ],
)
def test_output_that_no_loss_takes(forward, expected):
    conv = nn.Conv2d(3, 5, 1)
    [(key, text)] = errors(planned(forward, conv=conv))
    assert key == "model"
    assert expected in text
    assert "(n, classes, rows, columns)" in text
    assert planned(forward, "infer", conv=conv).ok


def test_tiles_that_run_empty_are_a_warning():
    parts = {"conv": nn.Conv2d(3, 3, 9, padding=4), "fc": nn.Linear(3, 5)}
    plan = planned(
        lambda n, x: classify(n, F.max_pool2d(n.conv(x), 4)), parallel={"tiles": [5, 1]}, **parts
    )
    assert plan.ok
    [empty] = plan.findings
    assert empty.severity == "warning"
    assert "makes a map of 3x2, so 2 of the 5x1 tiles of stage 0 hold nothing" in empty.text


@pytest.mark.parametrize(
    ("turned", "keys", "advice", "end"),
    [
        (2, {"stages": 3, "balance": [4, 1, 1]}, {"balance": [2, 2, 2]}, " hold 2 layers"),
        (
            3,
            {"stages": 2, "spatial_stages": 2},
            {"balance": [3, 3], "spatial_stages": 1},
            " hold 3 layers",
        ),
        (
            2,
            {"stages": 3, "spatial_stages": 2, "balance": [2, 2, 2]},
            {"spatial_stages": 1},
            "parallel.spatial_stages=1",
        ),
    ],
)
def test_end_of_the_tiles_that_a_refusal_names_avoids_it(turned, keys, advice, end):
    def forward(n: Any, x: torch.Tensor) -> torch.Tensor:
        for index, conv in enumerate(n.convs):
            x = torch.relu(conv(x))
            x = x.flip(2) if index == turned else x
        return classify(n, x)

    convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(5))
    keys = {"tiles": [2, 1], **keys}
    parts = {"convs": convs, "fc": nn.Linear(3, 5)}
    plan = planned(forward, parallel={"gather": "never", **keys}, **parts)
    [(key, text)] = errors(plan)
    assert key == "parallel.gather"
    assert text.endswith(end)
    assert planned(forward, parallel={"gather": "never", **keys, **advice}, **parts).ok
