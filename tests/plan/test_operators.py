"""Operators have one entry, compiled regions no messages, and a graph any number of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from hires.core.errors import PlanError
from hires.core.registry import imported
from hires.parallel.reductions import REDUCTIONS
from hires.parallel.torch_faults import SUBSTITUTES
from hires.plan.graph import GraphOfSamples
from hires.plan.operators.operator_facts import OPERATORS, facts_of, operator_rows
from hires.plan.regions import Region, regions_of
from tests.helpers import layouts, new_operator
from tests.helpers.small_plans import forked, plan_of


def test_every_rule_has_its_kernel_and_every_kernel_its_rule():
    def with_rule(*rules: str) -> set[str]:
        return {name for name in OPERATORS if {*rules} & {*facts_of(name).tiling}}

    windowed, statistics = with_rule("window"), with_rule("statistics")
    assert windowed == {n for n in OPERATORS if facts_of(n).window is not None}
    assert all(callable(imported(facts_of(name).window.kernel)) for name in windowed)
    assert statistics == {n for n in OPERATORS if facts_of(n).statistics is not None}
    summed = with_rule("statistics", "reduction", "softmax")
    assert summed == {n for n in OPERATORS if imported(facts_of(n).kernel) is not None}
    assert summed - statistics - with_rule("softmax") == {*REDUCTIONS}
    named = [(facts.own, facts.packs, facts.int8) for facts in map(facts_of, OPERATORS)]
    assert all(callable(imported(one)) for row in named for one in row if one is not None)
    # Those without a rule, as conv1d, are computed whole, perhaps by a kernel of ours.
    assert all(hasattr(torch.ops.aten, name) for name in {*SUBSTITUTES} - {*OPERATORS})


@pytest.fixture
def only_here() -> Iterator[None]:
    """Enters the new operator, whose network may have been traced before, and removes it again."""
    new_operator.register()
    yield
    new_operator.remove()


@pytest.mark.dist
@pytest.mark.usefixtures("only_here")
@pytest.mark.parametrize(
    ("name", "network", "parallel"),
    [
        ("diff", "network", {"tiles": [3, 1]}),
        ("hires_tests::row_diff", "network_of_own_namespace", {"tiles": [2, 1]}),
    ],
)
def test_new_operator_is_one_module_with_its_entry_and_kernel(tmp_path, name, network, parallel):
    model = {"name": "custom", "target": f"tests.helpers.new_operator:{network}", "classes": 4}
    keys = {"image": [10, 9], "model": model, "parallel": parallel}
    plan = layouts.plan_of(layouts.config_of(**keys))
    assert plan.ok
    if "tiles" in parallel:
        at = {op.node for stage in plan.stages for op in stage.comm}
        assert name in {plan.graph.by_name[node].kind for node in at & {*plan.graph.by_name}}
    assert operator_rows()[name]["tiles"] == "window"
    answer = layouts.verified(tmp_path, **keys)
    assert answer["max_rel_err"] < 1e-10, answer


def test_modules_of_operators_are_found_by_scanning_and_need_no_torch(python):
    code = (
        "import sys, hires.operators\n"
        f"hires.operators.__path__.append({new_operator.FOLDER!r})\n"
        "from hires.plan.operators.operator_facts import facts_of\n"
        "assert facts_of('diff').window and facts_of('conv2d').window and facts_of('q_add').own\n"
        "assert 'torch' not in sys.modules\n"
    )
    answer = python("-c", code)
    assert answer.code == 0, answer.err


def test_nodes_with_messages_are_in_no_region():
    single = plan_of()
    assert regions_of(single, single.stages[0]) == [Region(0, len(single.graph.nodes))]
    plan = plan_of(tiles=[2, 1])
    [stage] = plan.stages
    regions = regions_of(plan, stage)
    inside = {plan.graph.nodes[i].name for r in regions for i in range(r.first, r.last)}
    assert regions
    for op in stage.comm:
        assert op.kind == "loss" or inside.isdisjoint((op.node, *op.readers))


def test_graph_between_two_traces_is_that_of_a_trace():
    for training in (True, False):
        one, other = forked(8, training), forked(4, training)
        for samples in (1, 3, 5):
            graph = GraphOfSamples(one, other).graph(samples)
            assert graph.to_dict() == forked(samples, training).to_dict()
    odd = GraphOfSamples(
        forked(27, False), forked(13, False)
    )  # their difference is no power of two
    assert all(odd.graph(samples).input_shape[0] == samples for samples in range(1, 27))
    with pytest.raises(PlanError, match="changes with the number of samples"):
        GraphOfSamples(one, dataclasses.replace(other, nodes=other.nodes[:-1])).graph(2)
