"""Stages are as even as FLOPs allow and cut where little crosses; segments keep few numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.plan.graph import INPUT
from hires.plan.partition import SLACK, layer_starts, partition
from tests.helpers.graphs import chain, graph_of, node

IMAGE = [1, 4, 8, 8]


costs = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=8)


def names(graph, indices):
    return [graph.nodes[index].name for index in indices]


# None: a list of tensors. A mask travelled in the type of the activations, and `where` refused it.
@pytest.mark.parametrize(("shape", "dtype"), [(None, "float32"), (IMAGE, "bool")])
def test_layer_begins_at_each_convolution_unless_no_floating_point_tensor_crosses(shape, dtype):
    graph = graph_of(
        node("pad", "pad", [INPUT], IMAGE),
        node("conv1", "conv2d", ["pad"], IMAGE),
        node("odd", "gt", ["conv1"], shape, dtype=dtype),
        node("conv2", "conv2d", ["conv1"], IMAGE),
        node("use", "where", ["odd", "conv2"], IMAGE),
        node("conv3", "conv2d", ["use"], IMAGE),
    )
    assert names(graph, layer_starts(graph)) == ["pad", "odd", "conv3"]


@settings(max_examples=100, deadline=None)
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
    # One that outweighs all others still leaves some for every stage: it read beyond the list.
    assert partition(chain([(100, 1), (1, 1), (1, 1)]), [1] * 3, None) == [0, 1, 2, 3]
