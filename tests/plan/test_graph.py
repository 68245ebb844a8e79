"""Facts that are read off a graph."""

from __future__ import annotations

from hires.plan.graph import INPUT, Graph, Node, Parameter, describe
from tests.helpers.graphs import graph_of, node

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


def test_list_of_tensors_has_no_elements_of_its_own():
    assert Node("chunk", "chunk.default", {}, None, None).num_elements == 0


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
