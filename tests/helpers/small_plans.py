"""Plans of a network with everything that layouts treat differently, traced once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.config.run_config import RunConfig, from_dict
from hires.nets.trace import trace
from hires.plan.graph import Graph
from hires.plan.plan import Plan
from hires.plan.planner import make_plan

IMAGE = (13, 10)
BATCH = 8

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "dp": {"replicas": 2},
    "lp": {"stages": 3},
    "pp": {"stages": 3, "microbatches": 4},
    "pp 1f1b": {"stages": 4, "microbatches": 4, "schedule": "1f1b"},
    "sp rows": {"tiles": [3, 1]},
    "sp columns": {"tiles": [1, 2], "microbatches": 2},
    "sp grid": {"tiles": [3, 2]},
    "sp with empty tiles": {"tiles": [7, 1]},
    "sp+lp": {"tiles": [2, 2], "stages": 3, "spatial_stages": 1},
    "sp+pp": {"tiles": [2, 1], "stages": 4, "spatial_stages": 2, "microbatches": 4},
    "sp+pp 1f1b": {
        "tiles": [2, 2],
        "stages": 5,
        "spatial_stages": 3,
        "microbatches": 4,
        "schedule": "1f1b",
    },
    "sp in every stage": {"tiles": [1, 2], "stages": 3, "spatial_stages": 3, "microbatches": 2},
    "two grids": {"tiles": [[2, 2], [1, 2]], "stages": 3, "microbatches": 2},
    "local_dp": {"tiles": [2, 1], "stages": 3, "local_dp": 2},
    "gems": {"stages": 3, "directions": 2, "pairs": 2, "schedule": "gems"},
    "gems_1f1b": {"stages": 4, "directions": 2, "microbatches": 2, "schedule": "gems_1f1b"},
    "sp+gems": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"},
    "sp+gems on shared ranks": {"tiles": [2, 2], "stages": 2, "directions": 2, "schedule": "gems"},
    "sp+pp+gems with local_dp": {
        "tiles": [3, 1],
        "stages": 3,
        "local_dp": 2,
        "directions": 2,
        "schedule": "gems_1f1b",
    },
}


class Forked(nn.Module):
    """Convolutions with a skip from first to last, a gate of the whole image, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 5, stride=2, padding=2)
        self.gate = nn.Linear(4, 4)
        self.conv3 = nn.Conv2d(4, 4, 3, padding=1)
        self.bn3 = nn.BatchNorm2d(4)
        self.up = nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(8, 4, 3, padding=1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, 5)."""
        skip = torch.relu(self.bn1(self.conv1(x)))
        y = self.conv2(skip)
        y = y * torch.sigmoid(self.gate(y.mean((2, 3)))).view(-1, 4, 1, 1)
        y = self.up(torch.relu(self.bn3(self.conv3(y))))
        y = nn.functional.interpolate(y, skip.shape[2:])
        return self.fc(self.last(torch.cat([y, skip], 1)).mean((2, 3)))


def config_of(task: str = "train", batch: int = BATCH, **parallel: Any) -> RunConfig:
    """Returns the config of a layout."""
    return from_dict(
        {
            "image": list(IMAGE),
            "batch": batch,
            "parallel": parallel,
            "task": {"name": task},
            "model": {"classes": 5},
        }
    )


@functools.cache
def forked(samples: int, training: bool) -> Graph:
    """Returns the graph of :class:`Forked`."""
    return trace(Forked(), [samples, 3, *IMAGE], training)


def plan_of(task: str = "train", batch: int = BATCH, **parallel: Any) -> Plan:
    """Returns the plan of a layout of :class:`Forked`."""
    config = config_of(task, batch, **parallel)
    samples = max(1, batch // config.parallel.pieces)
    return make_plan(config, forked(samples, task == "train"))


def by_kind(plan: Plan) -> dict[str, tuple[int, int]]:
    """Returns messages and bytes of one step, by kind."""
    sums: dict[str, tuple[int, int]] = {}
    for row in plan.totals["by_route"]:
        messages, num_bytes = sums.get(row["kind"], (0, 0))
        sums[row["kind"]] = messages + row["messages"], num_bytes + row["bytes"]
    return sums
