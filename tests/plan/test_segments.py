"""Where a stage is cut into what is computed again: few numbers kept, no segment too large."""

from __future__ import annotations

import itertools

import pytest

from hires.plan.partition import crossing_elements, cut_segments
from hires.plan.plan import Stage
from hires.plan.planner import make_plan
from hires.plan.program import events
from tests.helpers.graphs import chain, graph_of, node
from tests.helpers.small_plans import config_of, forked


def stage_of(graph) -> Stage:
    """Returns a stage that holds the whole network."""
    stage = Stage(0, 0, len(graph.nodes), [1, 1], 0)
    stage.layout = {"input": "whole", **{n.name: "whole" for n in graph.nodes}}
    return stage


def test_sixteen_equal_layers_are_cut_about_every_square_root():
    graph = chain([(1, 100)] * 16)
    bounds = cut_segments(graph, stage_of(graph), in_flight=1)
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(lengths) == 16
    kept, largest = 100 * (len(lengths) - 1), 100 * max(lengths)
    assert kept + largest <= 100 * (3 + 4)  # 4 segments of 4


def test_many_microbatches_in_flight_ask_for_fewer_cuts():
    graph = chain([(1, 100)] * 16)
    few = cut_segments(graph, stage_of(graph), in_flight=1)
    many = cut_segments(graph, stage_of(graph), in_flight=8)
    assert len(many) < len(few)


def test_skip_counts_wherever_it_crosses():
    graph = graph_of(
        node("a", "conv2d", ["input"], [1, 1, 2, 2]),
        node("b", "conv2d", ["a"], [1, 1, 2, 2]),
        node("c", "conv2d", ["b"], [1, 1, 2, 2]),
        node("d", "add", ["a", "c"], [1, 1, 2, 2]),
    )
    # Before a: the image of 64 numbers; before b: a; before c: a and b; before d: a and c.
    assert [*crossing_elements(graph, stage_of(graph)).values()][:4] == [64, 4, 8, 8]


@pytest.mark.parametrize("checkpoint", ["stage", "block"])
def test_forward_messages_come_again_in_the_backward_pass(checkpoint):
    config = config_of(tiles=[2, 1], stages=2)
    plain = make_plan(config, forked(8, True))
    config.memory.checkpoint = checkpoint
    again = make_plan(config, forked(8, True))
    assert again.ok, again.findings
    assert again.verdict.startswith("deadlock-free")

    def said(plan, action, word):
        return sum(action in e.what and word in e.what for e in events(plan, 0) if e.kind == "recv")

    assert said(again, "in F0", "halo") == said(plain, "in F0", "halo")
    assert said(again, "in B0", "halo") > said(plain, "in B0", "halo")
    halos = plain.totals["by_kind"]["halo"]["messages"]
    assert again.totals["by_kind"]["halo"]["messages"] > halos


def test_inference_computes_nothing_again():
    config = config_of("infer", tiles=[2, 1])
    config.memory.checkpoint = "block"
    plan = make_plan(config, forked(8, False))
    assert not any(stage.segments for stage in plan.stages)
