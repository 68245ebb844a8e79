"""The advised end of the tiles, or grid, is a layout that works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.plan.graph import Graph
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from tests.helpers.small_plans import config_of
from tests.helpers.tiny_nets import traced

IMAGE = (13, 10)


def five(turned: int) -> Graph:
    """Five convolutions and a classifier, a map upside down behind the convolution ``turned``."""

    def forward(n: Any, x: torch.Tensor) -> torch.Tensor:
        for index, conv in enumerate(n.convs):
            x = torch.relu(conv(x))
            x = x.flip(2) if index == turned else x
        return n.fc(x.mean((2, 3)))

    convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(5))
    return traced(forward, (4, 3, *IMAGE), convs=convs, fc=nn.Linear(3, 5))


def planned(graph: Graph, keys: dict[str, Any]) -> Plan:
    passes = keys.get("directions", 1) * keys.get("pairs", 1)
    return make_plan(config_of("train", 4 * passes, gather="never", **keys), graph)


def advised(text: str) -> dict[str, Any]:
    """The keys of ``parallel`` that a text names with values."""
    return {k: json.loads(v) for k, v in re.findall(r"parallel\.(\w+)=([\[\]\d,]+)", text)}


def told(plan: Plan) -> list[str]:
    """What is said of tiles, in every severity."""
    return [f.text for f in plan.findings if "cannot divide" in f.text or "hold nothing" in f.text]


ENDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # The list says how many stages are tiled; spatial_stages=1 alone changed nothing.
    "list of grids": (
        3,
        {"tiles": [[2, 1], [2, 1]], "stages": 3, "balance": [2, 2, 2]},
        {"tiles": [[2, 1]], "spatial_stages": 1},
    ),
    "list of grids and their number": (
        3,
        {"tiles": [[2, 1], [2, 1]], "stages": 3, "spatial_stages": 2, "balance": [2, 2, 2]},
        {"tiles": [[2, 1]], "spatial_stages": 1},
    ),
    "one grid": (
        3,
        {"tiles": [2, 1], "stages": 3, "spatial_stages": 2, "balance": [2, 2, 2]},
        {"spatial_stages": 1},
    ),
    # A layout of two stages in one direction was advised, whatever there was.
    "two directions": (
        2,
        {"tiles": [2, 1], "stages": 3, "balance": [4, 1, 1], "directions": 2, "schedule": "gems"},
        {"balance": [2, 2, 2]},
    ),
    "all stages in tiles": (2, {"tiles": [2, 1]}, {"stages": 2, "balance": [2, 4]}),
    "several stages in tiles": (
        1,
        {"tiles": [[2, 1], [1, 2]], "stages": 3, "balance": [3, 1, 2]},
        {"tiles": [[2, 1]], "spatial_stages": 1, "balance": [1, 2, 3]},
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_advised_end_of_the_tiles_is_one_that_works(case):
    turned, keys, advice = ENDS[case]
    graph = five(turned)
    [finding] = [f for f in planned(graph, keys).findings if f.severity == "error"]
    assert advised(finding.text) == advice
    plan = planned(graph, keys | advice)
    assert plan.ok
    assert told(plan) == []


def pooled(before: int, behind: int) -> Graph:
    """Three convolutions; a pool in the first layer and one in the second."""

    def forward(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(n.a(x), before)
        return n.fc(n.c(F.max_pool2d(n.b(x), behind)).mean((2, 3)))

    convs = {name: nn.Conv2d(3, 3, 3, padding=1) for name in "abc"}
    return traced(forward, (4, 3, *IMAGE), **convs, fc=nn.Linear(3, 5))


@pytest.mark.parametrize(
    ("pools", "keys", "advice"),
    [
        ((3, 1), {"tiles": [7, 2]}, {"tiles": [4, 2]}),
        ((3, 2), {"tiles": [7, 2]}, {"tiles": [4, 2], "stages": 2, "balance": [1, 3]}),
        ((1, 6), {"tiles": [4, 2]}, {"stages": 2, "balance": [1, 3]}),
        (
            (3, 1),
            {"tiles": [[7, 1], [2, 2]], "stages": 3, "balance": [1, 1, 2]},
            {"tiles": [[4, 1], [2, 2]]},
        ),
        (
            (1, 6),
            {"tiles": [[4, 1], [4, 1]], "stages": 3, "balance": [1, 1, 2]},
            {"tiles": [[4, 1]], "spatial_stages": 1},
        ),
        (
            (3, 2),
            {"tiles": [[7, 1], [1, 2]], "stages": 3, "balance": [2, 1, 1]},
            {"tiles": [[4, 1]], "spatial_stages": 1, "balance": [1, 2, 1]},
        ),
    ],
)
def test_grid_that_fits_the_maps_is_named(pools, keys, advice):
    # "fewer parallel.tiles" was said, without how many.
    graph = pooled(*pools)
    text, *_ = told(planned(graph, keys))
    assert advised(text) == advice
    plan = planned(graph, keys | advice)
    assert plan.ok
    assert told(plan) == []
