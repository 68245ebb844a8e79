"""Plans of small random networks and layouts, without torch."""

from __future__ import annotations

import math
import random
from typing import Any

from hires.core.config.run_config import from_dict
from hires.core.schedules import SCHEDULES
from hires.plan.graph import INPUT, Graph, Node, Parameter
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from tests.helpers.graphs import graph_of, node

Made = tuple[Node, dict[str, Parameter]]
GRIDS = ([2, 1], [1, 2], [3, 1], [2, 2])
CHANNELS = 2


def random_graph(rng: random.Random, samples: int, size: list[int], num_layers: int) -> Graph:
    """Returns convolutions with norms, skips and what tiles cannot divide, and a classifier."""
    shape = image = [samples, CHANNELS, *size]
    made: list[Made] = []
    maps: dict[str, list[int]] = {}
    last = INPUT

    def add(name: str, kind: str, reads: list[str], args: dict[str, Any]) -> str:
        made.append(node(name, kind, reads, shape))
        made[-1][0].args.update(args)
        return name

    for layer in range(num_layers):  # a convolution of 1x1, 3x3 or 5x5 that may halve the map
        kernel, stride = rng.choice([1, 3, 3, 5]), rng.choice([1, 1, 2])
        shape = [*shape[:2], *(-(-length // stride) for length in shape[2:])]
        args = {"stride": [stride] * 2, "padding": [kernel // 2] * 2, "dilation": [1, 1]}
        last = add(f"c{layer}", "conv2d", [last], args)
        made[-1][0].flops = rng.randint(1, 9)
        weight = Parameter([CHANNELS, CHANNELS, kernel, kernel], "float32", True)
        made[-1][1][f"{last}.weight"] = weight
        for kind, args in (("batch_norm", {"training": True}), ("relu", {})):
            if rng.random() < 0.5:
                last = add(f"{kind}{layer}", kind, [last], args)
        skips = [name for name, other in maps.items() if other == shape]
        if skips and rng.random() < 0.6:
            last = add(f"add{layer}", "add", [last, rng.choice(skips)], {})
        if rng.random() < 0.15:  # computed whole
            last = add(f"flip{layer}", "flip", [last], {"dims": [2]})
        maps[last] = shape
    shape = shape[:2]
    add("pool", "mean", [last], {"dim": [2, 3], "keepdim": False})
    add("fc", "linear", ["pool"], {"weight": {"param": "fc.weight"}})
    made[-1][1]["fc.weight"] = Parameter([CHANNELS, CHANNELS], "float32", True)
    return graph_of(*made, image=tuple(image))


def random_plan(rng: random.Random) -> Plan:
    """Returns a plan that can run, of 1 to 20 ranks."""
    while True:
        num_layers = rng.randint(2, 5)
        parallel = random_layout(rng, num_layers)
        pieces = math.prod(
            parallel[key] for key in ("replicas", "microbatches", "directions", "pairs")
        )
        size = [rng.randint(6, 15), rng.randint(6, 15)]
        config = from_dict(
            {
                "image": size,
                "batch": pieces * parallel["local_dp"],
                "model": {"classes": CHANNELS},
                "task": {"name": rng.choice(["train", "train", "infer"])},
                "memory": {"checkpoint": rng.choice(["none", "none", "stage", "block"])},
                "parallel": parallel,
            }
        )
        graph = random_graph(rng, parallel["local_dp"], size, num_layers)
        plan = make_plan(config, graph)
        if plan.ok:
            return plan
        # Both copies of a layer on one rank may be more than a layout allows; all else is wrong.
        assert parallel["directions"] == 2, plan.findings


def random_layout(rng: random.Random, num_layers: int) -> dict[str, Any]:
    """Returns the keys of a layout of a network with so many layers."""
    both = rng.random() < 0.4
    stages = rng.randint(1 + both, min(4, num_layers))
    spatial = rng.randint(0, min(stages, 2))
    schedules = [name for name in SCHEDULES if SCHEDULES[name].directions == 1 + both]
    return {
        "tiles": [rng.choice(GRIDS) for _ in range(spatial)] or [1, 1],
        "spatial_stages": spatial,
        "stages": stages,
        "local_dp": rng.choice([1, 1, 2]) if spatial < stages else 1,
        "replicas": rng.choice([1, 1, 1, 2]),
        "microbatches": rng.randint(1, 3 if both else 4),
        "directions": 1 + both,
        "pairs": rng.choice([1, 1, 2]) if both else 1,
        "schedule": rng.choice(schedules),
    }
