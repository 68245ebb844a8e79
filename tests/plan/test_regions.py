"""Everything that a rank computes without messages is in a region, and nothing else."""

from __future__ import annotations

import dataclasses

from hires.plan.partition import add_segments
from hires.plan.planner import make_plan
from hires.plan.regions import ALONE, MESSAGES, RANDOM, Region, findings, reasons, regions_of
from tests.helpers.small_plans import config_of, forked, plan_of


def test_one_rank_has_one_region():
    for task in ("train", "infer"):
        plan = plan_of(task)
        [stage] = plan.stages
        assert regions_of(plan, stage) == [Region(0, len(plan.graph.nodes))]
        assert reasons(plan, stage) == {}


def test_nodes_with_messages_are_in_no_region():
    plan = plan_of(tiles=[2, 1])
    [stage] = plan.stages
    regions, out = regions_of(plan, stage), reasons(plan, stage)
    inside = {plan.graph.nodes[i].name for r in regions for i in range(r.first, r.last)}
    assert regions
    assert inside.isdisjoint(out)
    assert inside | out.keys() == {node.name for node in plan.graph.nodes}
    assert set(out.values()) == {MESSAGES, ALONE}
    for op in stage.comm:
        if op.kind != "loss":
            assert {out[name] for name in (op.node, *op.readers)} == {MESSAGES}


def test_segments_that_are_computed_again_have_regions_of_their_own():
    plan = plan_of()
    add_segments(plan, "block")
    [stage] = plan.stages
    bounds = set(stage.segments)
    assert len(bounds) > 2
    for region in regions_of(plan, stage):
        assert not bounds & set(range(region.first + 1, region.last))


def test_random_numbers_stay_outside():
    plan = plan_of()
    node = plan.graph.nodes[3]
    nodes = [*plan.graph.nodes]
    nodes[3] = dataclasses.replace(node, op="rand_like.default", seeded=True)
    plan.graph = dataclasses.replace(plan.graph, nodes=nodes)
    assert reasons(plan, plan.stages[0])[node.name] == RANDOM


def test_plan_says_how_much_is_compiled_and_why_not_more():
    config = config_of(tiles=[2, 1])
    config.engine.compile = "stage"
    plan = make_plan(config, forked(8, True))
    finding, slower = [one for one in plan.findings if one.key == "engine.compile"]
    assert [finding, slower] == [*findings(plan)]
    assert slower.severity == "warning"
    assert "on a CPU a compiled training step takes 1.2 to 1.4 times as long" in slower.text
    assert f" of {len(plan.graph.nodes)} nodes are compiled" in finding.text
    assert f"not: each {MESSAGES}" in finding.text
    config.task.name = "infer"
    assert len([*findings(make_plan(config, forked(8, True)))]) == 1
    config.device = "simulated"
    [refused] = [f for f in make_plan(config, forked(8, True)).findings if f.severity == "error"]
    assert "compiles nothing for device=simulated" in refused.text


def test_engines_need_a_gpu_and_stages_without_tiles():
    config = config_of(tiles=[2, 1])
    config.task.name, config.engine.compile = "infer", "tensorrt"
    config.device = "cpu"
    plan = make_plan(config, forked(8, False))
    [error] = [one.text for one in plan.findings if one.severity == "error"]
    assert "builds engines for NVIDIA GPUs, and this run computes on device=cpu; use" in error
    [tiles] = findings(make_plan(config_of(tiles=[2, 1]), forked(8, False)), "tensorrt")
    assert tiles.severity == "error"
    assert "stage 0 is cut into 2 x 1 tiles, which exchange messages" in tiles.text
    assert "use a layout without tiles (parallel=single, lp, pp or gems)" in tiles.text
    plan = make_plan(config_of(), forked(8, False))
    note, *_ = findings(plan, "tensorrt")  # this plan trains, of which there is a warning
    assert note.severity == "note"
    assert note.text.endswith("an engine holds its weights again, and room for its values")
