"""Halo exchanges between real ranks."""

from __future__ import annotations

import math

import pytest

from tests.helpers.halo_jobs import adjoint, adjoints
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("tiles", "overlap"), [([3, 1], "off"), ([1, 2], "on"), ([2, 2], "on")])
def test_backward_is_the_adjoint_of_every_exchange(tiles: list[int], overlap: str):
    # <H x, y> = <x, H* y>: an exchange cut off from autograd, or gradients added twice, break it.
    model = {"name": "custom", "target": "tests.helpers.custom_nets:zoo"}
    parallel = {"tiles": tiles, "halo": {"overlap": overlap}}
    config = config_of(image=[37, 41], model=model, data={"classes": 5}, parallel=parallel)
    plan = plan_of(config)
    ops = [op for op in plan.stages[0].comm if op.kind == "halo" and op.back]
    kinds = {plan.graph.by_name[reader].kind for op in ops for reader in op.readers}
    assert kinds >= {"conv2d", "conv_transpose2d", "max_pool2d", "avg_pool2d", "pad", "slice"}
    assert kinds >= {"upsample_bilinear2d", "upsample_nearest2d"}
    sums = run_ranks(adjoints, plan.world, plan.to_dict(), [op.node for op in ops], 7)
    for op, by_rank in zip(ops, zip(*sums, strict=True), strict=True):
        forward, backward = (math.fsum(side) for side in zip(*by_rank, strict=True))
        assert forward == pytest.approx(backward, rel=1e-11), op.node


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
