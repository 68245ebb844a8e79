"""The engine executes exactly the list that the plan proved: groups, messages, waits, in order."""

from __future__ import annotations

from typing import Any

import pytest

from hires.comm import shared
from hires.core.config.run_config import to_dict
from hires.core.ranks import mailbox_limits
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.proof.prove import creation
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
def test_ranks_communicate_and_wait_as_the_plan_says(parallel: dict[str, Any]):
    check(parallel, {})


def test_branches_borrow_the_pixels_of_a_value_once():
    check({"tiles": [2, 2], "halo": {"overlap": "on"}}, {}, "cells")


@pytest.mark.parametrize("checkpoint", ["none", "block"])
def test_one_exchange_serves_several_layers(checkpoint: str):
    halo = {"fuse": 3, "overlap": "on"}
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 2, "halo": halo}
    check(parallel, {"checkpoint": checkpoint})


def test_large_halos_go_round_the_memory_as_the_plan_says(monkeypatch: pytest.MonkeyPatch):
    # Between the sizes of this layout's halos, so that both ways are used by turns.
    monkeypatch.setattr(mailbox_limits, "MAIL_BYTES", 8192)
    plan = check({"tiles": [2, 1], "stages": 2}, {})
    assert {e.mail for e in events(plan, 0) if e.kind == "send" and "halo" in e.what} == {
        True,
        False,
    }


def check(parallel: dict[str, Any], memory: dict[str, Any], net: str = "zoo") -> Plan:
    """Compares the plan of a layout with the log of its ranks."""
    model = {"name": "custom", "target": f"tests.helpers.custom_nets:{net}"}
    data = {"classes": 5, "length": 16}
    config = config_of(
        image=[37, 41], batch=4, model=model, data=data, parallel=parallel, memory=memory
    )
    plan = plan_of(config)
    logs = run_ranks(
        logged_step, plan.world, to_dict(config), plan.to_dict(), mailbox_limits.MAIL_BYTES
    )
    for rank, log in enumerate(logs):
        assert _once(log) == _once(_planned(plan, rank))
    return plan


def _planned(plan: Plan, rank: int) -> list[tuple]:
    """Returns all that the plan says of a rank, in order."""
    planned: list[tuple] = []
    open_sends: list[tuple[int, int]] = []
    for event in [*creation(groups(plan), rank), *events(plan, rank)]:
        if event.kind in ("send", "recv"):
            through_memory = event.mail and shared.supported()
            planned.append((event.kind, event.peer, event.tag, event.shape, through_memory))
            open_sends += [(event.peer, event.tag)] * (event.kind == "send")
        elif event.kind == "wait_sends":
            # The engine has a handle for each send: it waits for one after the other.
            planned += [("wait_send", *send) for send in open_sends]
        elif event.kind in ("wait_send", "wait_recv"):
            planned.append((event.kind, event.peer, event.tag))
            if event.kind == "wait_send":
                open_sends.remove((event.peer, event.tag))
        else:
            gradients = event.what.startswith("gradients")
            kind = "gradients" if gradients else event.kind
            planned.append((kind, tuple(groups(plan)[event.peer])))
    return planned


def _once(log: list[tuple]) -> list[tuple]:
    """Returns a log in which the sums of a group's gradients, one per tensor or bucket, are one.

    They may be several: all members issue them in one order, so the plan has one for all.
    """
    return [
        entry
        for index, entry in enumerate(log)
        if entry[0] != "gradients" or entry not in log[:index]
    ]
