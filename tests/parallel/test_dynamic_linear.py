"""Linear layers whose rows have scales of their own: every layout has the bits of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.core.config.precision_config import LINEAR
from hires.plan.passes.int8 import quantised
from tests.helpers.int8_cases import rows_by_definition
from tests.helpers.linear_nets import mixer, transformer
from tests.helpers.quantised_nets import QuantisedNet

SIZE = (31, 40)
"""Patches of 3 x 3 leave a row and a column over; tiles have 10 rows by 13 columns of tokens."""


@pytest.mark.parametrize("network", [mixer, transformer])
def test_layers_have_the_bits_of_the_definition_on_their_rounded_weights(network):
    torch.manual_seed(2)
    net = QuantisedNet(network(SIZE), torch.rand(2, 3, *SIZE), linear="dynamic")
    made, count = net.run(net.graph)[0], 0
    for node in net.graph.nodes:
        if node.kind != "q_dynamic_linear":
            continue
        layer = net.net.get_submodule(node.layer)
        weight, count = layer.weight.detach().double(), count + 1
        scale = weight.abs().amax(1, keepdim=True) / 127
        numbers = (weight / scale).round()
        multiplier = scale.flatten().float()
        offset = -(numbers.double().sum(1) * multiplier).float()
        args = numbers[..., None, None], multiplier, offset, layer.bias
        x = made[node.args["input"]["value"]]
        assert torch.equal(made[node.name], rows_by_definition(x, *args)), node.name
    assert count == 5


def test_what_has_no_rule_stays_in_float_with_the_reason():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return F.linear(x, self.fc.weight, x.mean((0, 1)) * self.fc.bias) + self.fc(x)

    for linear in LINEAR:
        kept = QuantisedNet(Odd(), torch.rand(2, 3, 2, 2), linear=linear).graph.kept
        assert "its bias is computed" in kept.values(), kept
    graph = QuantisedNet(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), torch.rand(2, 3, 2, 2))
    graph = graph.float_graph
    weight = next(n.args["weight"]["param"] for n in graph.nodes if "linear" in n.kind)
    graph.params[weight].shape = [5, 66312]  # the largest sums are 2^31 or more
    assert "it sums more products than 32 bits hold" in quantised(graph, {}, {}).kept.values()
    graph.params[weight].shape = [5, 66311]
    assert not quantised(graph, {}, {}, linear="dynamic").kept
