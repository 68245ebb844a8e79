"""What does an int8 network round, and which of its operators compute with integers?"""

from __future__ import annotations

import pytest
import torch

from hires.core.config.quant_config import STATIC
from hires.core.precisions import INT8
from hires.plan.passes.int8_roundings import Roundings, int8_operators
from tests.helpers.joined_nets import joined
from tests.helpers.quantised_nets import QuantisedNet


@pytest.fixture(scope="module")
def net():
    return QuantisedNet(joined(), torch.rand(2, 3, 6, 5))


def test_a_join_is_an_operator_in_integers(net):
    """It keeps its own kind, and was none."""
    assert [*int8_operators(net.graph)] == ["large", "small", "cat", "head", "mean"]


@pytest.mark.parametrize(
    ("kept", "values"),
    [
        ([], "input large small cat head mean"),
        (["cat"], "input cat head mean"),  # the layers' sums are real numbers, head rounds cat
        (["cat", "head"], "input"),  # a mean follows its input
        (["large", "small"], "cat head mean"),
    ],
)
def test_a_value_is_rounded_that_an_operator_in_integers_makes_or_reads(net, kept, values):
    roundings = Roundings(net.float_graph, net.affines, {}, INT8, STATIC)
    assert {*roundings.keeping(dict.fromkeys(kept, "by name")).values} == {*values.split()}
    alone = roundings.alone(net.float_graph.by_name["cat"])
    assert {*alone.values} == {"large", "small", "cat"}
    assert alone.layers == frozenset()
