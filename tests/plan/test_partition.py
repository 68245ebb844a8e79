"""Stages are as even as FLOPs allow, and cut where little crosses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.plan.graph import INPUT
from hires.plan.partition import (
    MESSAGE,
    SLACK,
    cheapest_cuts,
    cut_costs,
    layer_starts,
    partition,
)
from tests.helpers.graphs import chain, cut_values, graph_of, node

IMAGE = [1, 4, 8, 8]

costs = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=8)


def names(graph, indices):
    return [graph.nodes[index].name for index in indices]


def test_layer_begins_at_each_convolution_and_takes_what_follows():
    graph = graph_of(
        node("pad", "pad", [INPUT], IMAGE),
        node("conv1", "conv2d", ["pad"], IMAGE),
        node("relu1", "relu", ["conv1"], IMAGE),
        node("conv2", "conv2d", ["relu1"], IMAGE),
        node("conv3", "conv2d", ["conv2"], IMAGE),
    )
    assert names(graph, layer_starts(graph)) == ["pad", "conv2", "conv3"]


def test_network_without_weights_is_one_layer():
    graph = graph_of(node("relu", "relu", [INPUT], IMAGE), node("exp", "exp", ["relu"], IMAGE))
    assert layer_starts(graph) == [0]
    assert partition(graph, [1] * 1, None) == [0, 2]


@pytest.mark.parametrize("crossing", [{"shape": None, "dtype": None}, {"dtype": "bool"}])
def test_only_floating_point_tensors_may_cross_a_cut(crossing):
    # A mask travelled in the type of the activations, and `where` refused it at the other end.
    shape = crossing.pop("shape", IMAGE)
    graph = graph_of(
        node("conv1", "conv2d", [INPUT], IMAGE),
        node("odd", "gt", ["conv1"], shape, **crossing),
        node("conv2", "conv2d", ["conv1"], IMAGE),
        node("use", "where", ["odd", "conv2"], IMAGE),
        node("conv3", "conv2d", ["use"], IMAGE),
    )
    assert names(graph, layer_starts(graph)) == ["conv1", "odd", "conv3"]


def test_layer_that_can_begin_nowhere_belongs_to_the_one_before():
    graph = graph_of(
        node("conv1", "conv2d", [INPUT], IMAGE),
        node("odd", "gt", [INPUT], IMAGE, dtype="bool"),
        node("conv2", "conv2d", ["conv1"], IMAGE),
        node("relu2", "relu", ["conv2"], IMAGE),
        node("use", "where", ["odd", "relu2"], IMAGE),
        node("conv3", "conv2d", ["use"], IMAGE),
        node("sum", "add", ["conv3", "odd"], IMAGE),
    )
    graph.nodes[0], graph.nodes[1] = graph.nodes[1], graph.nodes[0]
    assert names(graph, layer_starts(graph)) == ["odd"]


def test_layer_begins_where_the_fewest_numbers_cross():
    # Blocks that begin with norm and ReLU sent both the block's input and what ReLU made of it.
    graph = graph_of(
        node("conv1", "conv2d", [INPUT], [1, 5]),
        node("relu", "relu", ["conv1"], [1, 5]),
        node("conv2", "conv2d", ["relu"], [1, 5]),
        node("sum", "add", ["conv1", "conv2"], [1, 5]),
        node("last", "conv2d", ["sum"], [1, 5]),
    )
    assert names(graph, layer_starts(graph)) == ["conv1", "relu", "last"]


def test_everything_read_later_crosses_a_cut_but_the_images():
    graph = graph_of(
        node("conv1", "conv2d", [INPUT], [1, 3]),
        node("skip", "relu", ["conv1"], [1, 5]),
        node("conv2", "conv2d", ["skip"], [1, 7]),
        node("sum", "add", ["conv2", "skip", INPUT], [1, 11]),
    )
    assert cut_values(graph, 2) == ["skip"]
    assert cut_values(graph, 3) == ["skip", "conv2"]
    assert cut_costs(graph) == [0, 3 + MESSAGE, 5 + MESSAGE, 12 + 2 * MESSAGE, 0]


def test_few_large_tensors_cross_rather_than_many_small_ones():
    # A cut inside a cell of AmoebaNet sent five tensors where one between cells sends two.
    small = [node(f"small{k}", "relu", ["conv1"], [1, 100]) for k in range(4)]
    graph = graph_of(
        node("conv1", "conv2d", [INPUT], [1, 500]),
        *small,
        node("join", "cat", [f"small{k}" for k in range(4)], [1, 400]),
        node("conv2", "conv2d", ["join"], [1, 100]),
    )
    assert names(graph, layer_starts(graph)) == ["conv1", "conv2"]
    graph.nodes[5].shape = [1, 700]
    assert names(graph, layer_starts(graph)) == ["conv1", "small0"]


def test_balance_counts_layers():
    graph = chain([(1, 1)] * 5, between=1)
    assert partition(graph, [1] * 3, [1, 3, 1]) == [0, 2, 8, 10]


def test_even_layers_make_even_stages():
    assert partition(chain([(10, 1)] * 8), [1] * 4, None) == [0, 2, 4, 6, 8]


def test_tiled_stage_gets_as_many_times_the_work_as_it_has_ranks():
    assert partition(chain([(10, 1)] * 10), [4, 1], None) == [0, 8, 10]


def test_cut_moves_within_the_slack_to_where_less_crosses():
    # 100 | 100 is even, 104 | 96 sends a hundredth; 110 | 90 would send nothing but is too uneven.
    graph = chain([(96, 9), (4, 500), (4, 5), (6, 1), (90, 9)])
    assert partition(graph, [1] * 2, None) == [0, 3, 5]


def test_one_layer_that_outweighs_all_others_still_leaves_some_for_every_stage():
    # The search went on from stages that already held every layer, and read beyond the list.
    assert partition(chain([(100, 1), (1, 1), (1, 1)]), [1] * 3, None) == [0, 1, 2, 3]


@settings(max_examples=150, deadline=None)
@given(costs=costs, data=st.data())
def test_partition_is_the_best_of_all(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    ranks = data.draw(st.lists(st.integers(1, 4), min_size=num_stages, max_size=num_stages))
    flops, elements = zip(*costs, strict=True)

    def largest(cuts):
        stages = zip(itertools.pairwise(cuts), ranks, strict=True)
        return max(sum(flops[a:b]) / shared for (a, b), shared in stages)

    def crossing(cuts):
        return sum(elements[cut - 1] for cut in cuts[1:-1])

    every = [
        [0, *inner, len(costs)]
        for inner in itertools.combinations(range(1, len(costs)), num_stages - 1)
    ]
    limit = min(map(largest, every)) * SLACK
    best = min(crossing(cuts) for cuts in every if largest(cuts) <= limit)
    chosen = partition(chain(list(costs)), ranks, None)
    assert len(set(chosen)) == num_stages + 1
    assert largest(chosen) <= limit
    assert crossing(chosen) == best


class Counted(list):
    """Counts how often it is read."""

    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("layers", "stages"), [(156, 8), (1200, 64)])
def test_deep_network_is_cut_in_few_steps(layers, stages):
    # The size of ResNet-152, and one eight times that; the first search was cubic.
    flops = [1000 + index * 7919 % 501 for index in range(layers)]
    total = Counted([0, *itertools.accumulate(flops)])
    assert len(cheapest_cuts(total, [1] * layers, [1] * stages)) == stages
    # A stage has about layers / stages layers, and begins or ends at any of them.
    assert total.num_read < 10 * layers * layers
