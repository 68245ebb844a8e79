"""Holders of a stage divide its update: rows, messages, and which exchange is chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.gradient_orders import TOGETHER
from hires.plan.groups import gradient_group, groups, running_decays, trained
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.prove import prove_each
from hires.plan.updates import (
    ALL_GATHER,
    PUBLISH,
    REDUCE_SCATTER,
    UNIT,
    scatters_gradients,
    shares_of_holders,
)
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.small_plans import by_kind

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 3},
    "mirrored": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems", "replicas": 2},
}


def config(layout: str, exchange: str, **keys: Any) -> Any:
    """Returns a config whose update is divided."""
    update = {"shard": True, "exchange": exchange}
    return config_of(batch=12, optimizer=update, parallel=LAYOUTS[layout], **keys)


def planned(layout: str, exchange: str, **keys: Any) -> Plan:
    """Returns the plan of a small network whose update is divided."""
    plan = plan_of(config(layout, exchange, **keys))
    assert plan.ok, plan.findings
    return plan


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_hold_every_row_once_in_equal_parts(layout):
    model = {"name": "resnet", "depth": 18, "classes": 1000}
    plan = planned(layout, "broadcast", model=model, image=[64, 64])
    for stage in plan.stages:
        shares = shares_of_holders(plan, stage.index)
        assert len(shares) > 1
        assert [*shares] == groups(plan)[gradient_group(plan, stage.index)]
        found: dict[str, list[tuple[int, int]]] = {}
        for rows in (rows for share in shares.values() for rows in share):
            found.setdefault(rows.name, []).append((rows.first, rows.last))
            shape = plan.graph.params[rows.name].shape
            each = math.prod(shape[1:])
            assert rows.elements == (rows.last - rows.first) * each
            assert rows.first * each % UNIT == 0
            assert rows.last * each % UNIT == 0 or rows.last == shape[0]
        assert found.keys() == trained(plan, stage.index).keys()
        for name, parts in found.items():
            firsts, lasts = zip(*parts, strict=True)
            assert [0, *lasts] == [*firsts, plan.graph.params[name].shape[0]]
        sizes = [sum(rows.elements for rows in share) for share in shares.values()]
        assert max(sizes) < 1.02 * sum(sizes) / len(sizes) + UNIT * 9 * 64


def test_holders_scatter_before_the_update_and_gather_behind_it():
    plan = planned("mirrored", "scatter")
    for rank in range(plan.world):
        own = [*events(plan, rank)]
        kinds = [event.kind for event in own]
        update = kinds.index("optimise")
        assert REDUCE_SCATTER in kinds[:update]
        assert {*kinds[update + 1 :]} == {ALL_GATHER}
        assert not {PUBLISH, "issue"} & {*kinds}
        calls = [event for event in own if event.traffic]
        numbers = sum(plan.stages[slot.stage].params for slot in plan.slots_of(rank))
        sent = sum(one.num_bytes for one in calls if one.operation == "reduce_scatter")
        assert sent == 8 * numbers
        assert all(one.route is not None for one in calls)
    programs = [[*events(plan, rank)] for rank in range(plan.world)]
    assert not prove_each(programs, groups(plan))
    del programs[-1][-1]
    [problem] = prove_each(programs, groups(plan))
    assert "parameters of stage" in problem


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scattering_sends_two_thirds_of_the_bytes(layout):
    sent, plan = [], planned(layout, "scatter")
    for one in (planned(layout, "broadcast"), plan):
        kinds = by_kind(one)
        sent.append(kinds["gradient"][1] + kinds["parameter"][1])
        for stage in one.stages:  # running statistics of several copies are summed in both ways
            others = len(groups(one)[gradient_group(one, stage.index)]) - 1
            decays = running_decays(one, stage.index)
            statistics = sum(one.graph.params[name].num_elements for name in decays)
            sent[-1] -= 2 * others * statistics * 8
    # A gather sends as much of each rank as of the one with the largest share.
    assert 2 * sent[0] <= 3 * sent[1] < 2.1 * sent[0]
    [note] = [one for one in plan.findings if one.key == "optimizer.shard"]
    assert "by reduce-scatters and all-gathers" in note.text


def test_fewer_bytes_decide_but_for_sums_beside_the_pass():
    auto = config("replicas", "auto")
    plan = plan_of(auto)
    assert plan.scatters
    assert not scatters_gradients(auto, "chain")
    # A sum of codes has two messages, between which no other may come.
    coded = config("replicas", "auto", comm={"codec": "bf16", "shared_memory": False})
    assert plan_of(coded).gradients == TOGETHER
    assert plan_of(replace(coded, comm=CommConfig(shared_memory=False))).gradients != TOGETHER
