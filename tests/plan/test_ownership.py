"""Does every holder of a stage move its part of the parameters, and get the others'?"""

from __future__ import annotations

import math
from typing import Any

import pytest

from hires.plan.event import BYTES
from hires.plan.groups import gradient_group, groups, trained
from hires.plan.ownership import (
    PACKED_BYTES,
    PUBLISH,
    UNIT,
    owned_numbers,
    publications,
    shares_of_holders,
)
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.proof.prove import run_machine
from hires.plan.traffic import operations
from tests.helpers.layouts import config_of, plan_of

SHARD = {"shard": True, "exchange": "broadcast"}
SCATTER = {"shard": True, "exchange": "scatter"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 3},
    "tiles": {"tiles": [2, 1]},
    "mirrored": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems", "replicas": 2},
}


def planned(layout: str, shard: bool = True, **keys: Any) -> Plan:
    """Returns the plan of a small network whose update is divided."""
    update = SHARD if shard else {}
    plan = plan_of(config_of(batch=12, optimizer=update, parallel=LAYOUTS[layout], **keys))
    assert plan.ok, plan.findings
    return plan


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_hold_every_row_once_in_equal_parts(layout):
    plan = planned(layout, model={"name": "resnet", "depth": 18, "classes": 1000}, image=[64, 64])
    for stage in plan.stages:
        holders = groups(plan)[gradient_group(plan, stage.index)]
        shares = shares_of_holders(plan, stage.index)
        assert len(holders) > 1
        assert [*shares] == holders
        found: dict[str, list[tuple[int, int]]] = {}
        for rows in (rows for share in shares.values() for rows in share):
            found.setdefault(rows.name, []).append((rows.first, rows.last))
            shape = plan.graph.params[rows.name].shape
            each = math.prod(shape[1:])
            assert rows.numbers == (rows.last - rows.first) * each
            assert rows.first * each % UNIT == 0
            assert rows.last * each % UNIT == 0 or rows.last == shape[0]
        assert found.keys() == trained(plan, stage.index).keys()
        for name, parts in found.items():
            assert [0, *(last for _, last in parts)] == [
                *(first for first, _ in parts), plan.graph.params[name].shape[0]
            ]  # fmt: skip
        sizes = [sum(rows.numbers for rows in share) for share in shares.values()]
        assert max(sizes) < 1.02 * sum(sizes) / len(sizes) + UNIT * 9 * 64


def test_small_parts_travel_packed_and_large_ones_alone():
    plan = planned("tiles", model={"name": "resnet", "depth": 18, "classes": 9}, image=[64, 64])
    sent = publications(plan, 0, False)
    assert sum(one.elements for one in sent) == plan.stages[0].params
    for one in sent:
        size = one.elements * BYTES[one.dtype]
        assert size <= PACKED_BYTES or len(one.parts) == 1
    assert {one.owner for one in sent} == {0, 1}
    assert len(sent) < len(trained(plan, 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_holders_publish_together_behind_the_update(layout):
    plan = planned(layout)
    for rank in range(plan.world):
        kinds = [event.kind for event in events(plan, rank)]
        last = kinds[kinds.index("optimise") + 1 :]
        assert last
        assert set(last) == {PUBLISH}
        calls = operations(plan, rank, [*events(plan, rank)])
        planned_bytes = sum(one.num_bytes for one in calls if one and one.kind == "parameter")
        held = {slot.stage for slot in plan.slots_of(rank)}
        assert planned_bytes == 8 * sum(plan.stages[stage].params for stage in held)
    assert plan.totals["by_kind"]["parameter"]["bytes"] > 0
    assert not any(e.kind == PUBLISH for e in events(planned(layout, shard=False), 0))


def test_proof_names_an_update_that_one_holder_never_takes():
    plan = planned("tiles")
    programs = [[*events(plan, rank)] for rank in range(2)]
    assert not run_machine(programs, groups(plan)).problems
    del programs[1][-1]
    [problem] = run_machine(programs, groups(plan)).problems
    assert "parameters of stage 0 from rank 1" in problem


def test_division_without_holders_is_a_warning():
    plan = plan_of(config_of(optimizer=SHARD, parallel={"stages": 2}))
    [finding] = [one for one in plan.findings if one.key == "optimizer.shard"]
    assert finding.severity == "warning"
    assert "divides nothing" in finding.text
    assert owned_numbers(plan, 0) == plan.stages[0].params
