"""Draws the rows of ``hires bench parity``: layouts and networks.

Every row is a random choice of one value for each key. Of many random rows the one is taken that
shows the most pairs of values that no row before it has shown, so that a few dozen rows try every
value with nearly every other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from hires.bench.contestants import bench_data
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError

Choice = dict[str, Any]
"""One value of each key of CHOICES."""


def _as_tuple(value: Any) -> Any:
    """Returns lists, and lists in them, as tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


_DATA = bench_data("parity.yaml")
NETWORKS: dict[str, Choice] = _DATA["networks"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "network": tuple(NETWORKS),
    **{key: _as_tuple(values) for key, values in _DATA["choices"].items()},
}
MAX_RANKS = 12
TRIES = 60
"""Random rows of which the best is taken."""


def rows(count: int, seed: int, accept: Callable[[RunConfig], bool]) -> list[RunConfig]:
    """Returns rows that can run, each with many pairs of values that those before it lack.

    Args:
        count: how many.
        seed: decides them.
        accept: whether the plan of a row is good; asked only for rows that would be taken.
    """
    chance = random.Random(seed)
    seen: set[tuple[tuple[str, Any], ...]] = set()
    made: list[RunConfig] = []
    while len(made) < count:
        drawn = [draw(chance) for _ in range(TRIES)]
        ranked = sorted(drawn, key=lambda choice: -len(_pairs(choice) - seen))
        for choice in ranked:
            config = config_of(choice, len(made))
            if config is not None and accept(config):
                made.append(config)
                seen |= _pairs(choice)
                break
    return made


def draw(chance: random.Random) -> Choice:
    """Returns one random row."""
    choice = {key: chance.choice(values) for key, values in CHOICES.items()}
    if choice["directions"] == 1:
        choice["pairs"] = 1
    return choice


def config_of(choice: Choice, number: int) -> RunConfig | None:
    """Returns the config of a row, or None if its values do not go together."""
    tiles = choice["tiles"]
    grids = [list(g) for g in tiles] if isinstance(tiles[0], tuple) else [list(tiles)]
    spatial = len(grids) if grids != [[1, 1]] else 0
    behind = choice["stages"] - spatial
    ranks = sum(rows * cols for rows, cols in grids[:spatial]) + behind * choice["local_dp"]
    both = choice["directions"] == 2
    if behind < 0 or ranks * choice["replicas"] > MAX_RANKS or (both and ranks < 2):
        return None
    names = ("gems", "gems_1f1b") if both else ("gpipe", "1f1b")
    parallel = {
        "name": f"parity{number}",
        "tiles": grids if len(grids) > 1 else grids[0],
        "schedule": names[choice["schedule"] == "speed"],
        "halo": {"fuse": choice["fuse"], "overlap": choice["overlap"]},
        **{key: choice[key] for key in ("stages", "directions", "pairs", "microbatches")},
        **{key: choice[key] for key in ("local_dp", "replicas")},
    }
    pieces = choice["replicas"] * choice["directions"] * choice["pairs"] * choice["microbatches"]
    values = {
        "image": list(choice["image"]),
        "batch": 4 * pieces,
        "steps": 3,
        "seed": number,
        "model": {"classes": 5, **NETWORKS[choice["network"]]},
        "data": {"classes": 5, "length": 64},
        "precision": {"name": "fp64"},
        "memory": {"checkpoint": choice["checkpoint"]},
        "task": {"name": choice["task"]},
        "parallel": parallel,
    }
    try:
        return from_dict(values)
    except ConfigError:
        return None


def _pairs(choice: Choice) -> set[tuple[tuple[str, Any], ...]]:
    """Returns all pairs of a row's values."""
    return set(itertools.combinations(sorted(choice.items(), key=lambda item: item[0]), 2))


def overrides(config: RunConfig) -> Iterator[str]:
    """Yields the words after ``hires verify`` that make a row again."""
    model, parallel = config.model, config.parallel
    network = next(n for n in NETWORKS.values() if _is_network(n, config))
    yield f"model.name={model.name}"
    yield from (f"model.{key}={value}" for key, value in network.items() if key != "name")
    yield f"model.classes={model.classes}"
    yield f"image=[{config.height},{config.width}]"
    for key in ("batch", "seed"):
        yield f"{key}={getattr(config, key)}"
    yield f"data.classes={config.data.classes}"
    yield f"data.length={config.data.length}"
    yield f"task={config.task.name}"
    yield f"memory.checkpoint={config.memory.checkpoint}"
    yield f"parallel.tiles={parallel.tiles}".replace(" ", "")
    for key in ("stages", "directions", "pairs", "schedule", "microbatches", "local_dp"):
        yield f"parallel.{key}={getattr(parallel, key)}"
    yield f"parallel.replicas={parallel.replicas}"
    yield f"parallel.halo.fuse={parallel.halo.fuse}"
    yield f"parallel.halo.overlap={parallel.halo.overlap}"


def _is_network(network: Choice, config: RunConfig) -> bool:
    """Whether a config's network is one of NETWORKS."""
    return all(getattr(config.model, key) == value for key, value in network.items())
