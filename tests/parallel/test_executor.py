"""The engine executes exactly the list of communications that the plan proved."""

from __future__ import annotations

from typing import Any

import pytest

from hires.core.config import to_dict
from hires.plan.groups import groups
from hires.plan.program import events
from tests.helpers.jobs import logged_step
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

LAYOUTS: list[dict[str, Any]] = [
    {"replicas": 2},
    {"stages": 3, "microbatches": 4, "schedule": "1f1b"},
    {"tiles": [2, 2]},
    {"tiles": [2, 1], "stages": 3, "spatial_stages": 2, "microbatches": 2},
    {"stages": 3, "directions": 2, "pairs": 2, "schedule": "gems"},
    {"tiles": [[2, 2], [1, 2]], "stages": 3, "microbatches": 2},
    {"tiles": [2, 1], "stages": 2, "local_dp": 2, "directions": 2, "schedule": "gems_1f1b"},
]


@pytest.mark.parametrize("checkpoint", ["stage", "block"])
def test_what_is_computed_again_is_said_again_as_the_plan_says(checkpoint: str):
    parallel = {"tiles": [2, 1], "stages": 2, "microbatches": 2}
    check(parallel, {"checkpoint": checkpoint})


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_ranks_communicate_as_the_plan_says(parallel: dict[str, Any]):
    check(parallel, {})


def test_branches_borrow_the_pixels_of_a_value_once():
    check({"tiles": [2, 2], "halo": {"overlap": "on"}}, {}, "cells")


@pytest.mark.parametrize("checkpoint", ["none", "block"])
def test_one_exchange_serves_several_layers(checkpoint: str):
    halo = {"fuse": 3, "overlap": "on"}
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 2, "halo": halo}
    check(parallel, {"checkpoint": checkpoint})


def check(parallel: dict[str, Any], memory: dict[str, Any], net: str = "zoo") -> None:
    """Compares the plan of a layout with the log of its ranks."""
    model = {"name": "custom", "target": f"tests.helpers.custom_nets:{net}"}
    data = {"classes": 5, "length": 16}
    config = config_of(
        image=[37, 41], batch=4, model=model, data=data, parallel=parallel, memory=memory
    )
    plan = plan_of(config)
    logs = run_ranks(logged_step, plan.world, to_dict(config), plan.to_dict())
    for rank, log in enumerate(logs):
        assert _once(log) == _once(_planned(plan, rank))


def _planned(plan: Any, rank: int) -> list[tuple]:
    """Returns the plan's posts and collectives of a rank."""
    planned: list[tuple] = []
    for event in events(plan, rank):
        if event.kind in ("send", "recv"):
            planned.append((event.kind, event.peer, event.tag, event.shape))
        elif event.kind == "collective":
            kind = "gradients" if event.what.startswith("gradients") else "collective"
            planned.append((kind, tuple(groups(plan)[event.peer])))
    return planned


def _once(log: list[tuple]) -> list[tuple]:
    """Returns a log in which the sums of a group's gradients, one per tensor or bucket, are one."""
    return [
        entry
        for index, entry in enumerate(log)
        if entry[0] != "gradients" or entry not in log[:index]
    ]
