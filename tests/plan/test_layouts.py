"""Every layout is proved, counted as it will run, and survives plan.json."""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter

import pytest

from hires.core.config.precision_config import PrecisionConfig
from hires.core.errors import PlanError
from hires.plan.event import BYTES
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.program import events
from hires.plan.proof.prove import run_machine
from tests.helpers.damage import prove
from tests.helpers.small_plans import LAYOUTS, config_of, forked, plan_of

layouts = pytest.mark.parametrize("name", LAYOUTS)
tasks = pytest.mark.parametrize("task", ["train", "infer"])
replicas = pytest.mark.parametrize("replicas", [1, 2])


def planned(name: str, task: str = "train", replicas: int = 1) -> Plan:
    plan = plan_of(task, **{**LAYOUTS[name], "replicas": replicas})
    assert plan.ok, plan.findings
    return plan


@layouts
@tasks
@replicas
def test_layout_is_deadlock_free_and_its_messages_are_counted(name, task, replicas):
    plan = planned(name, task, replicas)
    programs = [list(events(plan, rank)) for rank in range(plan.world)]
    sends = [event for program in programs for event in program if event.kind == "send"]
    joined = sum(event.kind == "collective" for program in programs for event in program)
    assert plan.totals["messages"] == len(sends) + joined

    by_kind = plan.totals["by_kind"]
    point_to_point = [by_kind.get(kind, {"bytes": 0}) for kind in ("halo", "stage", "join")]
    sent = sum(math.prod(event.shape) * BYTES[event.dtype] for event in sends)
    assert sum(entry["bytes"] for entry in point_to_point) == sent
    assert plan.verdict.startswith(f"deadlock-free, {len(sends)} messages and ")
    assert (sent == 0) == (name in ("single", "dp"))


@layouts
@replicas
def test_proof_of_one_replica_stands_for_the_world(name, replicas):
    plan = planned(name, replicas=replicas)
    programs = [list(events(plan, rank)) for rank in range(plan.world)]
    whole = run_machine(programs, groups(plan))
    assert not whole.problems
    assert plan.verdict == (
        f"deadlock-free, {whole.num_messages} messages and {whole.num_collectives} collectives a "
        f"step"
    )


@layouts
@tasks
def test_plan_survives_json(name, task):
    plan = planned(name, task)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.to_dict() == plan.to_dict()
    assert prove(again) == prove(plan)


@layouts
def test_world_is_as_large_as_the_keys_say(name):
    plan = planned(name, replicas=2)
    parallel = config_of(**LAYOUTS[name]).parallel
    tiles = sum(rows * cols for rows, cols in parallel.grids[: parallel.spatial_stages])
    behind = (parallel.stages - parallel.spatial_stages) * parallel.local_dp
    assert plan.ranks_per_replica == tiles + behind
    assert plan.world == 2 * plan.ranks_per_replica
    for direction in range(plan.num_directions):
        slots = [plan.slot_of(rank, direction) for rank in range(plan.world)]
        assert len(set(slots)) == plan.world
        assert [plan.rank_of(*slot) for slot in slots] == list(range(plan.world))


@layouts
def test_every_node_belongs_to_one_stage_and_every_layer_is_counted(name):
    plan = planned(name)
    made = [node for stage in plan.stages for node in plan.nodes(stage.index)]
    assert made == plan.graph.nodes
    assert sum(stage.num_layers for stage in plan.stages) == 7
    assert all(stage.num_layers for stage in plan.stages)


def test_inference_sends_nothing_back():
    plan = planned("sp+pp", "infer")
    assert not any(edge.back for edge in plan.edges)
    kinds = Counter(action[0] for actions in plan.schedule for action in actions)
    assert set(kinds) == {"F"}
    assert "gradient" not in plan.totals["by_kind"]
    assert "norm" not in plan.totals["by_kind"]


def test_double_precision_doubles_every_message():
    # Sums were counted as four bytes a number in any precision.
    config = config_of(tiles=[2, 2], stages=2, replicas=2)
    single = make_plan(config, forked(4, True)).totals
    config.precision = PrecisionConfig("fp64")
    double = make_plan(config, forked(4, True)).totals
    assert double["messages"] == single["messages"]
    assert double["bytes"] == 2 * single["bytes"]


def test_other_schema_of_plan_json_is_refused():
    values = {**planned("single").to_dict(), "schema": 99}
    with pytest.raises(PlanError, match=r"plan\.json has schema 99, this hires reads 2"):
        Plan.from_dict(values)


@layouts
def test_pickled_plan_says_the_same(name):
    # Derived tables name objects of this process; a pickle that held them named none of the other.
    plan = planned(name)
    again = pickle.loads(pickle.dumps(plan))
    for rank in range(plan.ranks_per_replica):
        assert list(events(again, rank)) == list(events(plan, rank))
