"""Halo exchanges between real ranks: <H x, y> = <x, H* y>, which gradients added twice break."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.halo_jobs import adjoints
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist
KINDS = {"conv2d", "conv_transpose2d", "max_pool2d", "avg_pool2d", "pad", "slice"}
KINDS |= {"upsample_bilinear2d", "upsample_nearest2d"}
ZOO, CELLS = (
    {"model": {"name": "custom", "target": f"tests.helpers.custom_nets:{name}"}, "image": size}
    for name, size in (("Zoo", [37, 41]), ("Cells", [25, 22]))
)
RESNET = {"model": {"name": "resnet", "depth": 18, "classes": 4}, "image": [75, 61]}
CASES: dict[str, tuple[dict[str, Any], list[int], dict[str, Any], set[str]]] = {
    # network, tiles, halo keys, kinds or names of all that reads its exchanges
    "every kind, at once": (ZOO, [3, 1], {"overlap": "off"}, KINDS),
    "every kind": (ZOO, [2, 2], {"overlap": "on"}, KINDS),
    "of several layers": (RESNET, [2, 2], {"fuse": 3}, {"conv2d"}),
    "shared": (CELLS, [3, 2], {"overlap": "on"}, {"small", "max_pool2d", "large", "wide"}),
}


@pytest.mark.parametrize("name", CASES)
def test_backward_is_the_adjoint_of_every_exchange(name: str):
    net, tiles, halo, wanted = CASES[name]
    config = config_of(**net, data={"classes": 5}, parallel={"tiles": tiles, "halo": halo})
    plan = plan_of(config)
    ops = [op for op in plan.stages[0].comm if op.kind == "halo" and op.back]
    ops = ops if "kind" in name else sorted(ops, key=lambda op: len(op.readers))[-2:]
    readers = {reader for op in ops for reader in op.readers}
    assert wanted <= readers | {plan.graph.by_name[reader].kind for reader in readers}
    sums = run_ranks(adjoints, plan.world, plan.to_dict(), [op.node for op in ops], 7)
    for op, by_rank in zip(ops, zip(*sums, strict=True), strict=True):
        forward, backward = (math.fsum(side) for side in zip(*by_rank, strict=True))
        assert forward == pytest.approx(backward, rel=1e-11), op.node
