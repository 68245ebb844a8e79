"""Halo exchanges between real ranks."""

from __future__ import annotations

import math

import pytest

from tests.helpers.jobs import adjoint
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("node", ["stem", "dilated", "grouped", "max_pool", "up"])
@pytest.mark.parametrize(("tiles", "overlap"), [([3, 1], "off"), ([2, 2], "on")])
def test_backward_is_the_adjoint_of_the_exchange(node: str, tiles: list[int], overlap: str):
    # <H x, y> = <x, H* y>: an exchange cut off from autograd, or gradients added twice, break it.
    model = {"name": "custom", "target": "tests.helpers.custom_nets:zoo"}
    parallel = {"tiles": tiles, "halo": {"overlap": overlap}}
    config = config_of(image=[37, 41], model=model, data={"classes": 5}, parallel=parallel)
    plan = plan_of(config)
    sums = run_ranks(adjoint, plan.world, plan.to_dict(), node, 7)
    forward, backward = (math.fsum(side) for side in zip(*sums, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12)


@pytest.mark.parametrize(
    ("tiles", "node"), [([2, 1], "layer1.1.conv1"), ([2, 2], "layer2.0.conv1")]
)
def test_exchange_for_several_layers_gives_back_every_gradient(tiles: list[int], node: str):
    model = {"name": "resnet", "depth": 18, "classes": 4}
    parallel = {"tiles": tiles, "halo": {"fuse": 3 if node == "layer2.0.conv1" else 4}}
    plan = plan_of(config_of(image=[75, 61], model=model, parallel=parallel))
    sums = run_ranks(adjoint, plan.world, plan.to_dict(), node, 11)
    forward, backward = (math.fsum(side) for side in zip(*sums, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_shared_exchange_gives_back_the_sum_of_its_readers_gradients(overlap: str):
    model = {"name": "custom", "target": "tests.helpers.custom_nets:cells"}
    parallel = {"tiles": [3, 2], "halo": {"overlap": overlap}}
    config = config_of(image=[25, 22], model=model, data={"classes": 5}, parallel=parallel)
    plan = plan_of(config)
    op = next(op for op in plan.stages[0].comm if op.node == "small" and op.kind == "halo")
    assert op.readers == ["small", "max_pool2d", "large", "wide"]
    sums = run_ranks(adjoint, plan.world, plan.to_dict(), "small", 3)
    forward, backward = (math.fsum(side) for side in zip(*sums, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12)
