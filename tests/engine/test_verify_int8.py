"""Are quantised networks judged bit by bit, but for what sums in float on tiles?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hires.engine.verify_bounds import BITWISE, FloatSums, float_sums
from hires.plan.plan import Plan
from tests.helpers.quantised_nets import QuantisedNet, small_quantised
from tests.helpers.simulated_tiles import laid_out
from tests.helpers.small_nets8 import SIZES, network

GRIDS = (2, 1), (2, 2)


def sums_of(net: QuantisedNet, grid: tuple[int, int]) -> FloatSums:
    graph, stage = laid_out(net.graph, grid)
    plan = Plan(graph, [stage], [], 1, 1, False, "float32", [["F0"]] * stage.num_tiles)
    return float_sums(plan)


def kept_net(name: str, kinds: set[str]) -> QuantisedNet:
    """Returns a network whose convolutions of some kinds, or norms, stay in float."""
    small = small_quantised(name)
    kept = {n.name: "by name" for n in small.float_graph.nodes if n.kind in kinds}
    assert kept
    torch.manual_seed(2)
    return QuantisedNet(network(name, SIZES[name]), torch.rand(2, 3, *SIZES[name]), kept)


class Grouped(nn.Module):
    """A group norm, which has no rule for 8 bits, between layers that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("name", ["preact_resnet", "mixed"])
def test_networks_of_integers_and_of_single_floats_are_bitwise(name):
    for grid in GRIDS:
        sums = sums_of(small_quantised(name), grid)
        assert not sums.nodes
        assert sums.bounds is BITWISE


def test_convolutions_in_float_are_within_what_fp32_rounds():
    # `hires verify` called them "NOT equal", allowed 0, though fp32 kernels differ by shape.
    net = kept_net("unet", {"conv2d", "fused_conv2d", "conv_transpose2d"})
    assert not sums_of(net, (1, 1)).nodes
    for grid in GRIDS:
        sums = sums_of(net, grid)
        assert len(sums.nodes) > 5
        bound = sums.bounds.by_kind["output"]
        assert 1e-6 < bound < 4e-6
        whole = net.output()
        error = (net.output(grid) - whole).abs().max() / whole.abs().max()
        assert float(error) <= bound


def test_float_sums_that_are_rounded_again_may_differ_by_steps():
    torch.manual_seed(0)
    net = QuantisedNet(Grouped(), torch.rand(2, 3, 21, 17))
    sums = sums_of(net, (2, 1))
    assert [net.graph.by_name[name].kind for name in sums.nodes] == ["group_norm"]
    bound = sums.bounds.by_kind["output"]  # of one step: the last convolution's sums are exact
    assert bound == pytest.approx(4 * 2**-8 * 2**0.5)
    whole = net.output()
    assert float((net.output((2, 1)) - whole).abs().max() / whole.abs().max()) <= bound
    assert sums.bounds.by_kind["running_stats"] == 0
