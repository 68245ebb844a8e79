"""Halo exchanges between real ranks."""

from __future__ import annotations

import math

import pytest

from tests.helpers.jobs import adjoint
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("node", ["stem", "dilated", "grouped", "max_pool", "up"])
@pytest.mark.parametrize("tiles", [[3, 1], [2, 2]])
def test_backward_is_the_adjoint_of_the_exchange(node: str, tiles: list[int]):
    # <H x, y> = <x, H* y>: an exchange cut off from autograd, or gradients added twice, break it.
    model = {"name": "custom", "target": "tests.helpers.custom_nets:zoo"}
    config = config_of(image=[37, 41], model=model, data={"classes": 5}, parallel={"tiles": tiles})
    plan = plan_of(config)
    sums = run_ranks(adjoint, plan.world, plan.to_dict(), node, 7)
    forward, backward = (math.fsum(side) for side in zip(*sums, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12)
