"""Is the graph of a number of samples that was not traced the one that a trace makes?"""

from __future__ import annotations

import dataclasses

import pytest

from hires.core.errors import PlanError
from hires.plan.graph_samples import GraphOfSamples
from tests.helpers.small_plans import forked


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


def test_name_that_changes_with_the_samples_is_refused():
    one, other = forked(8, True), forked(4, True)
    renamed = dataclasses.replace(other, output="another")
    with pytest.raises(PlanError, match="changes with the number of samples"):
        GraphOfSamples(one, renamed).graph(2)


def test_one_number_of_samples_tells_no_other():
    one = GraphOfSamples(forked(4, True), forked(4, True))
    assert one.graph(4) is forked(4, True)
    with pytest.raises(PlanError, match="two traces of 4 samples"):
        one.graph(2)
