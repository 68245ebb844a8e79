"""Does a simulated rank compute a node when the pixels that it reads have come, and not before?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from hires.core.config.run_config import from_dict
from hires.core.ranks.timeline import COLLECTIVE, HALO
from hires.nets.trace import trace
from hires.plan.event import ALONE, Event
from hires.plan.halos import companions
from hires.plan.plan import CommOp, Plan
from hires.plan.planner import make_plan
from hires.plan.program import events, steps_of
from hires.plan.simulation.costs import timed_program
from tests.helpers.custom_nets import cells
from tests.helpers.small_plans import LAYOUTS, plan_of
from tests.helpers.tiny_nets import Net

ROUNDING = 1e-9
IN_TILES: dict[str, dict[str, Any]] = {
    "rows": {"tiles": [2, 1]},
    "grid": {"tiles": [2, 2]},
    "empty tiles": {"tiles": [7, 1]},
    "pipeline": {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2},
}


class SecondEach:
    """Costs in which every node takes one second: seconds count the nodes that are done."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def steps_s(self, rank: int, action: str) -> list[float]:
        stage = self.plan.stages[self.plan.slot_of(rank, self.plan.direction_of(action)).stage]
        return [1.0] * len(steps_of(self.plan, stage, action[0] == "B"))

    def optimiser_s(self, rank: int) -> float:
        return 0.0


class Said(NamedTuple):
    """One communication inside a pass."""

    kind: str
    event: Event
    done: float
    """Nodes that were computed before it, in this pass."""


def said(plan: Plan, rank: int) -> dict[str, list[Said]]:
    """Returns what a rank says to the other tiles, by action."""
    found: dict[str, list[Said]] = {action: [] for action in plan.actions_of(rank)}
    done = dict.fromkeys(found, 0.0)
    for item in timed_program(plan, rank, SecondEach(plan)):
        if item.action and item.event is None:
            done[item.action] += item.seconds
        elif item.kind in (HALO, COLLECTIVE):
            assert item.event is not None
            found[item.action].append(Said(item.kind, item.event, done[item.action]))
    return found


def check(plan: Plan) -> int:
    """Checks the place of all communication inside the passes; returns how many halos it saw."""
    assert plan.ok, plan.findings
    seen = 0
    for rank in range(plan.ranks_per_replica):
        listed = [item.event for item in timed_program(plan, rank, SecondEach(plan))]
        told = [e for e in events(plan, rank) if e.kind not in (*ALONE, "barrier")]
        assert [event for event in listed if event] == told
        for action, talk in said(plan, rank).items():
            seen += check_pass(plan, rank, action, talk)
    return seen


def check_pass(plan: Plan, rank: int, action: str, talk: list[Said]) -> int:
    """Checks one pass by the words of its events."""
    stage = plan.stages[plan.slot_of(rank, plan.direction_of(action)).stage]
    steps = steps_of(plan, stage, action[0] == "B")
    place = {(step.node.name, step.back): index for index, step in enumerate(steps)}
    by_node: dict[str, list[CommOp]] = {}
    for op in stage.comm:
        if op.kind == "halo":
            by_node.setdefault(op.node, []).append(op)
    seen = 0
    for node, ops in by_node.items():
        words = f"halo of {node} in {action}"
        there = [one for one in talk if one.event.what == f"the {words}"]
        back = [one for one in talk if one.event.what == f"the gradient of the {words}"]
        for one in there:
            check_forward(plan, ops, one, place)
        for one in back:
            assert one.done == pytest.approx(place[node, True] + 1) or one.event.kind[:4] != "wait"
        assert all(one.kind == HALO for one in there + back)
        seen += len(there) + len(back)
    rest = [one for one in talk if one.kind == COLLECTIVE]
    assert all(one.event.kind == "collective" for one in rest)
    assert seen + len(rest) == len(talk)
    return seen


def check_forward(plan: Plan, ops: list[CommOp], one: Said, place: dict[Any, int]) -> None:
    """Checks one event of the halos of a node: values go when made, and come before readers."""
    at = place[ops[0].node, False]
    if one.event.kind == "wait_recv":
        # The first reader computes at least its border afterwards; without overlap, all of it.
        begun = one.done - at
        assert -ROUNDING <= begun < (1 if plan.halo_overlap == "on" else ROUNDING)
        readers = {reader for op in ops for reader in op.readers} - {ops[0].node}
        assert all(one.done <= place[reader, False] for reader in readers)
    elif one.event.kind == "send":
        made = min(place.get((op.value, False), -1) for op in ops)
        # A value of a segment that is computed again later has been kept.
        assert one.done >= made + 1 - ROUNDING or made > at


def custom(net: Callable[[], nn.Module], checkpoint: str = "none", **parallel: Any) -> Plan:
    """Returns the plan of a network on a small image."""
    pieces = parallel.get("microbatches", 1)
    config = from_dict(
        {
            "image": [19, 22],
            "batch": 2,
            "parallel": parallel,
            "memory": {"checkpoint": checkpoint},
            "model": {"classes": 5},
        }
    )
    return make_plan(config, trace(net(), [2 // pieces, 3, 19, 22], True))


def two_values() -> nn.Module:
    """Returns a network with a cell whose branches read two values."""

    def forward(n: Any, x: Tensor) -> Tensor:
        x, y = n.left(x), n.right(x)
        return n.head((n.one(x) + n.two(y)).mean((2, 3)))  # type: ignore[no-any-return]

    parts = {name: nn.Conv2d(3, 3, 1) for name in ("left", "right")}
    windows = {name: nn.Conv2d(3, 3, 3, padding=1) for name in ("one", "two")}
    return Net(forward, **parts, **windows, head=nn.Linear(3, 5))


@pytest.mark.parametrize("overlap", ["off", "auto", "on"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_nodes_of_every_layout_are_computed_after_their_halos(name: str, overlap: str):
    plan = plan_of(**LAYOUTS[name])
    plan.halo_overlap = overlap
    assert (check(plan) > 0) == ("tiles" in LAYOUTS[name])


@pytest.mark.sampled(40)
@pytest.mark.parametrize("overlap", ["off", "auto", "on"])
@pytest.mark.parametrize("checkpoint", ["none", "stage", "block"])
@pytest.mark.parametrize("name", IN_TILES)
@pytest.mark.parametrize("net", [cells, two_values])
def test_halos_that_set_out_together_are_waited_for_one_by_one(
    net: Callable[[], nn.Module], name: str, checkpoint: str, overlap: str
):
    plan = custom(net, checkpoint, **IN_TILES[name])
    plan.halo_overlap = overlap
    if checkpoint != "block" and "stages" not in IN_TILES[name]:  # which may part them
        assert companions(plan.graph, plan.stages[0])
    assert check(plan) > 0
