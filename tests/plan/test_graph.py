"""What is read off a graph, and the graph of another number of samples."""

from __future__ import annotations

import dataclasses

import pytest

from hires.core.errors import PlanError
from hires.plan.graph import INPUT, Graph, Node, Parameter, describe
from hires.plan.graph_samples import GraphOfSamples
from tests.helpers.graphs import graph_of, node
from tests.helpers.small_plans import forked

IMAGE = [1, 1, 8, 8]


def test_values_and_parameters_are_found_wherever_they_stand():
    args = {
        "tensors": [{"value": "b"}, [{"value": "a"}], {"value": "b"}],
        "weight": {"param": "w"},
        "dtype": {"dtype": "float32"},
        "device": {"device": None},
        "index": 3,
        "name": "value",
    }
    made = Node("cat", "cat.default", args, [2, 3], "float32")
    assert made.inputs == ["b", "a"]
    assert made.params == ["w"]
    assert (made.kind, made.num_elements) == ("cat", 6)
    assert describe(made) == "cat (cat)"


def test_readers_and_positions():
    graph = graph_of(
        node("a", "relu", [INPUT], IMAGE),
        node("b", "add", ["a", "a"], IMAGE),
        node("c", "add", ["b", "a"], IMAGE),
    )
    assert graph.position == {"a": 0, "b": 1, "c": 2}
    assert graph.consumers == {INPUT: [0], "a": [1, 2], "b": [2]}
    assert graph.output == "c"
    assert graph.shape(INPUT) == IMAGE


def test_no_gradient_flows_into_the_images():
    graph = graph_of(
        node("a", "relu", [INPUT], IMAGE), node("b", "gt", ["a"], IMAGE, needs_grad=False)
    )
    assert [graph.needs_grad(name) for name in (INPUT, "a", "b")] == [False, True, False]


def test_graph_survives_plain_values():
    graph = graph_of(node("conv", "conv2d", [INPUT], IMAGE, flops=7))
    assert graph.params["conv.weight"] == Parameter([1, 1, 1, 1], "float32", True)
    assert graph.params["conv.weight"].num_elements == 1
    assert Graph.from_dict(graph.to_dict()) == graph


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("training", [True, False])
def test_graph_between_two_traces_is_that_of_a_trace(samples, training):
    between = GraphOfSamples(forked(8, training), forked(4, training))
    assert between.graph(samples).to_dict() == forked(samples, training).to_dict()


def test_network_with_other_operators_for_other_samples_is_refused():
    one, other = forked(8, True), forked(4, True)
    cut = dataclasses.replace(other, nodes=other.nodes[:-1])
    with pytest.raises(PlanError, match="other operators"):
        GraphOfSamples(one, cut).graph(2)


def test_one_number_of_samples_tells_no_other():
    one = GraphOfSamples(forked(4, True), forked(4, True))
    assert one.graph(4) is forked(4, True)
    with pytest.raises(PlanError, match="two traces of 4 samples"):
        one.graph(2)
