"""The executor runs the list that the plan proved: groups, passes, messages, waits, sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hires.core.config.run_config import RunConfig, to_dict
from hires.plan import updates
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.prove import creation
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.logged_steps import logged_step
from tests.helpers.pool import preload
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist
preload("tests.helpers.logged_steps")
BLOCK = {"checkpoint": "block"}
FUSED = {"stages": 2, "spatial_stages": 2, "halo": {"fuse": 3, "overlap": "on"}}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dp": ({"replicas": 2}, {}, "Zoo"),
    "pipeline": ({"stages": 3, "microbatches": 4, "schedule": "1f1b"}, {}, "Zoo"),
    "grids": ({"tiles": [[2, 2], [1, 2]], "stages": 3, "microbatches": 2}, {}, "Zoo"),
    "gems": ({"stages": 3, "directions": 2, "pairs": 2, "schedule": "gems"}, {}, "Zoo"),
    "local_dp": (
        {"tiles": [2, 1], "stages": 2, "local_dp": 2, "directions": 2, "schedule": "gems_1f1b"},
        *({}, "Zoo"),
    ),
    "again": ({"tiles": [2, 1], "stages": 2, "microbatches": 2}, {"checkpoint": "stage"}, "Zoo"),
    "branches": ({"tiles": [2, 2], "halo": {"overlap": "on"}}, {}, "Cells"),
    "fused again": ({"tiles": [2, 1], **FUSED}, BLOCK, "Zoo"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_communicate_and_wait_as_the_plan_says(name: str):
    check(*planned(*LAYOUTS[name]))


@pytest.mark.parametrize(
    ("gradients", "memory", "parallel"),
    [
        ("chain", BLOCK, {"tiles": [2, 1]}),
        ("end", {}, {"tiles": [2, 1]}),
        ("funnel", {}, {"tiles": [2, 1], "replicas": 2}),
        ("funnel", {}, {"stages": 3, "directions": 2, "schedule": "gems"}),
        ("concurrent", BLOCK, {"tiles": [2, 1]}),
    ],
)
def test_large_gradients_are_summed_where_the_plan_has_them(
    gradients: str,
    memory: dict[str, Any],
    parallel: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    # Nearly every weight of this network travels alone.
    monkeypatch.setattr(updates, "ALONE_BYTES", 256)
    plan, config = planned(parallel, memory)
    plan = replace(plan, gradients=gradients)
    check(plan, config)
    program = [event.kind for event in events(plan, 0)]
    inside = program[program.index("backward") : program.index("wait_sends")]
    assert ("issue" in inside) == (gradients != "end" and "stages" not in parallel)
    assert ("wait_issued" in inside) == (
        gradients in ("funnel", "concurrent") and "tiles" in parallel
    )
    assert program.count("issue") == program.count("wait_issued") > 3


@pytest.mark.parametrize(
    ("parallel", "kinds"),
    [
        ({"tiles": [1, 3]}, ("recv", "send")),
        ({"tiles": [1, 3]}, ("wait_recv", "wait_recv")),
        ({"stages": 3, "microbatches": 2}, ("recv", "recv")),
    ],
)
def test_events_that_change_places_in_the_plan_do_in_the_run(
    parallel: dict[str, Any], kinds: tuple[str, str]
):
    plan, config = planned(parallel)
    program = [*events(plan, 1)]
    first, second = next(
        (i, j)
        for i, one in enumerate(program)
        for j, other in enumerate(program[i + 1 : i + 8], start=i + 1)
        if (one.kind, other.kind) == kinds and (one.peer, one.tag) != (other.peer, other.tag)
        if all(event.part.node == one.part.node for event in program[i : j + 1])
        if all(event.kind in kinds for event in program[i : j + 1])
    )
    log = logs(plan, config, (1, first, second))[1]
    assert log == planned_log(plan, 1, (first, second)) != planned_log(plan, 1)


def test_operator_that_comes_before_its_event_ends_the_run():
    plan, config = planned({"tiles": [2, 1]})
    norms = [i for i, event in enumerate(events(plan, 0)) if event.what.startswith("norm")]
    with pytest.raises(Exception, match="where the plan has norm of"):
        logs(plan, config, (0, *norms[:2]))


def planned(
    parallel: dict[str, Any], memory: dict[str, Any] | None = None, net: str = "Zoo"
) -> tuple[Plan, RunConfig]:
    """Returns the plan of a layout, and its config."""
    model = {"name": "custom", "target": f"tests.helpers.custom_nets:{net}"}
    facts = {"image": [37, 41], "batch": 4, "data": {"classes": 5, "length": 16}}
    config = config_of(**facts, model=model, parallel=parallel, memory=memory or {})
    return plan_of(config), config


def logs(plan: Plan, config: RunConfig, *swap: tuple[int, int, int]) -> list[list[tuple]]:
    """Returns what each rank really does."""
    limit = updates.ALONE_BYTES
    return run_ranks(logged_step, plan.world, to_dict(config), plan.to_dict(), limit, *swap)


def check(plan: Plan, config: RunConfig) -> None:
    """Compares a plan with the log of its ranks."""
    for rank, log in enumerate(logs(plan, config)):
        assert log == planned_log(plan, rank)


def planned_log(plan: Plan, rank: int, swapped: tuple[int, int] | None = None) -> list[tuple]:
    """Returns all that the plan has of a rank, in order, as ``logged_step`` logs it."""
    log: list[tuple] = []
    open_sends: dict[tuple[int, int], int] = {}
    members, program = groups(plan), [*events(plan, rank)]
    if swapped is not None:
        one, other = swapped
        program[one], program[other] = program[other], program[one]
    for event in [*creation(members, rank), *program]:
        key = event.peer, event.tag
        if event.kind in ("send", "recv"):
            log.append((event.kind, *key, event.shape, event.backend))
            if event.kind == "send":
                open_sends[key] = open_sends.get(key, 0) + 1
        elif event.kind == "wait_sends":
            # One after the other, each with a handle of its own.
            log += [("wait_send", *k) for k, count in open_sends.items() for _ in range(count)]
        elif event.kind in ("wait_send", "wait_recv"):
            log.append((event.kind, *key))
            if event.kind == "wait_send":
                open_sends[key] -= 1
        elif event.kind == "create":
            log.append(("create", tuple(members[event.peer])))
        elif event.kind in ("collective", "issue", "wait_issued"):
            log.append((event.kind, tuple(members[event.peer]), math.prod(event.shape)))
        elif event.kind != "end":
            log.append((event.kind, event.part.action))
    return log
