"""A rewritten network computes in every layout what the network itself computes on one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.jobs import verify_each
from tests.helpers.layouts import config_of, given, plan_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

TWO_RANKS: dict[str, dict[str, Any]] = {
    "rows": {"tiles": [2, 1]},
    "columns, halos of three layers at once": {"tiles": [1, 2], "halo": {"fuse": 3}},
    "rows, halos of all layers at once": {"tiles": [2, 1], "halo": {"fuse": 99}},
    "overlap": {"tiles": [2, 1], "halo": {"overlap": "on"}},
    "stages": {"stages": 2, "microbatches": 2},
    "shards": {"stages": 1, "local_dp": 2},
    "both directions": {"stages": 2, "directions": 2, "schedule": "gems"},
}


def test_a_small_network_on_two_tiles(tmp_path):
    name = "columns, halos of three layers at once"
    config = config_of(task={"name": "infer"}, parallel=TWO_RANKS[name])
    assert "fused_conv2d" in {node.kind for node in plan_of(config).graph.nodes}
    errors = run_ranks(verify_each, 2, [given(name, tmp_path, config)])[0]
    assert errors[name] < 1e-10


@pytest.mark.slow
def test_random_networks_in_layouts_of_two_ranks(tmp_path):
    layouts = []
    for seed, (name, parallel) in enumerate(3 * [*TWO_RANKS.items()]):
        target = "tests.helpers.random_nets:composed"
        model = {"name": "custom", "target": target, "classes": 4, "args": {"seed": seed}}
        config = config_of(model=model, task={"name": "infer"}, parallel=parallel)
        layouts.append(given(f"{name} {seed}", tmp_path, config))
    errors = run_ranks(verify_each, 2, layouts)[0]
    assert len(errors) == len(layouts)
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.slow
def test_equal_values_that_are_shared_in_layouts_of_two_ranks(tmp_path):
    model = {"name": "amoebanet", "layers": 3, "filters": 8, "classes": 4}
    layouts = []
    for name in ("rows", "overlap", "stages", "both directions"):
        keys = {"parallel": TWO_RANKS[name], "image": [37, 41]}
        config = config_of(model=model, task={"name": "infer"}, **keys)
        assert plan_of(config).graph.shared > 5
        layouts.append(given(name, tmp_path, config))
    errors = run_ranks(verify_each, 2, layouts)[0]
    assert len(errors) == len(layouts)
    assert max(errors.values()) < 1e-12, errors
