"""The engine executes exactly the list of communications that the plan proved."""

from __future__ import annotations

from typing import Any

import pytest

from hires.core.config import to_dict
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
]


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_ranks_communicate_as_the_plan_says(parallel: dict[str, Any]):
    check("zoo", parallel)


def test_branches_borrow_the_pixels_of_a_value_once():
    check("cells", {"tiles": [2, 2], "halo": {"overlap": "on"}})


def test_one_exchange_serves_several_layers():
    check("zoo", {"tiles": [2, 1], "stages": 2, "spatial_stages": 2, "halo": {"fuse": 3}})


def check(name: str, parallel: dict[str, Any]) -> None:
    model = {"name": "custom", "target": f"tests.helpers.custom_nets:{name}"}
    config = config_of(
        image=[37, 41], batch=4, model=model, data={"classes": 5, "length": 16}, parallel=parallel
    )
    plan = plan_of(config)
    logs = run_ranks(logged_step, plan.world, to_dict(config), plan.to_dict())
    for rank, log in enumerate(logs):
        assert _once(log) == _planned(plan, rank)


def _planned(plan: Any, rank: int) -> list[tuple]:
    """Returns the plan's posts and collectives of a rank."""
    planned: list[tuple] = []
    for event in events(plan, rank):
        if event.kind in ("send", "recv"):
            planned.append((event.kind, event.peer, event.tag, event.shape))
        elif event.kind == "collective":
            planned.append(("gradients",) if event.what == "gradients" else ("collective",))
    return planned


def _once(log: list[tuple]) -> list[tuple]:
    """Returns a log in which the sums of gradients, one per tensor or bucket, are one entry."""
    kept = [entry for entry in log if entry != ("gradients",)]
    return kept + [("gradients",)] * (len(kept) < len(log))
