"""Lists the layouts of a number of ranks, by numbers alone.

    ranks = replicas x ( spatial stages x rows x cols  +  other stages x local_dp )

    8     = 2        x ( 1              x 1    x 2     +  2            x 1        )

Two layouts that differ in nothing but the names of rows and columns are symmetric where the image
is square: of ``[1,2]`` and ``[2,1]`` the second is listed, whose halos are whole rows. What leaves
the ranks as they are (microbatches, schedules, recomputation ...) is listed for each shape.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.plan.schedule import DIRECTIONS

MOST_GRIDS = 6
"""Grids of one number of tiles that are listed, the most square ones first."""
MOST_MICROBATCHES = 32
"""Of one model pass; more shorten a bubble that is small by then."""
FUSED = (1, 2, 4)
"""Windowed layers that one exchange of halos serves."""
SMOOTH = (2, 3, 5)
"""In a replica of more than ``MANY`` ranks, tiles of a stage are products of these alone, unless
the user gave their grid or no layout would be left."""
MANY = 64


SHAPE_KEYS = {
    "replicas": "parallel.replicas",
    "stages": "parallel.stages",
    "grid": "parallel.tiles",
    "spatial_stages": "parallel.spatial_stages",
    "local_dp": "parallel.local_dp",
    "directions": "parallel.directions",
}
"""Field of a shape -> the key that it decides."""
ORDER_KEYS = {
    "microbatches": "parallel.microbatches",
    "pairs": "parallel.pairs",
    "schedule": "parallel.schedule",
    "balance": "parallel.balance",
    "fuse": "parallel.halo.fuse",
    "checkpoint": "memory.checkpoint",
    "shards_optimizer": "optimizer.shard",
}
"""The same of what a layout does with its ranks."""
DECIDED = frozenset((*SHAPE_KEYS.values(), *ORDER_KEYS.values()))
"""Keys that a search decides; those that the user gave keep their values."""


@dataclass(frozen=True)
class LayoutShape:
    """Which ranks a layout has, whatever they do in which order."""

    replicas: int
    stages: int
    spatial_stages: int
    grid: tuple[int, int]
    local_dp: int
    directions: int

    @property
    def tiles(self) -> int:
        """Ranks that share an image in a spatial stage."""
        return self.grid[0] * self.grid[1]

    @property
    def ranks_of_stages(self) -> list[int]:
        """Ranks of each stage of one replica and direction."""
        behind = self.stages - self.spatial_stages
        return [self.tiles] * self.spatial_stages + [self.local_dp] * behind

    @property
    def keys(self) -> dict[str, Any]:
        """The keys that it sets."""
        return {"parallel.name": "single", **_values(self, SHAPE_KEYS)}


@dataclass(frozen=True)
class Candidate:
    """One layout."""

    shape: LayoutShape
    microbatches: int = 1
    pairs: int = 1
    schedule: str = "gpipe"
    checkpoint: str = "none"
    shards_optimizer: bool = False
    fuse: int = 1
    balance: tuple[int, ...] | None = None

    @property
    def pieces(self) -> int:
        """Microbatches of the whole world in one step."""
        shape = self.shape
        return shape.replicas * shape.directions * self.pairs * self.microbatches

    @property
    def change(self) -> Change:
        """What it sets of a config."""
        return Change(self.shape.keys | _values(self, ORDER_KEYS))

    @property
    def overrides(self) -> str:
        """The keys that differ from their defaults, as one types them."""
        single = Candidate(LayoutShape(1, 1, min(1, self.shape.spatial_stages), (1, 1), 1, 1))
        usual = single.change.keys
        keys = {key: value for key, value in self.change.keys.items() if value != usual[key]}
        return Change(keys).text or "parallel=single"


def candidate_of(keys: Mapping[str, Any]) -> Candidate:
    """Returns the layout whose :attr:`Candidate.change` has some keys; KeyError: one is missing."""

    def fields(names: Mapping[str, str]) -> dict[str, Any]:
        values = ((name, keys[key]) for name, key in names.items())
        return {name: tuple(v) if isinstance(v, list) else v for name, v in values}

    return Candidate(LayoutShape(**fields(SHAPE_KEYS)), **fields(ORDER_KEYS))


def _values(layout: LayoutShape | Candidate, names: Mapping[str, str]) -> dict[str, Any]:
    values = ((key, getattr(layout, name)) for name, key in names.items())
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values}


@dataclass(frozen=True)
class GivenKeys:
    """Keys of a layout that the user gave: layouts with other values are not looked at."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def allow(self, keys: Mapping[str, Any]) -> bool:
        """Whether some keys of a layout have the values that were given."""
        return all(self.values[key] == value for key, value in keys.items() if key in self.values)

    def get(self, key: str, usual: Any) -> Any:
        """Returns the value of a key, or the usual one if it was not given."""
        return self.values.get(key, usual)

    @property
    def grid(self) -> tuple[int, int] | None:
        """The grid of tiles that was given."""
        tiles = self.values.get("parallel.tiles")
        return None if tiles is None else (tiles[0], tiles[1])


NOTHING_GIVEN = GivenKeys()


def shapes(
    config: RunConfig, ranks: int, layers: int, given: GivenKeys = NOTHING_GIVEN
) -> Iterator[LayoutShape]:
    """Yields the shapes of exactly so many ranks, for a network of so many layers.

    Only those whose tiles are no smaller than a pixel, and whose replicas divide the batch.
    """
    any_tiles, yielded = given.grid is not None, False
    for shape in _every_shape(config, ranks, layers, given.grid, any_tiles):
        if given.allow(shape.keys):
            yielded = True
            yield shape
    if not yielded and not any_tiles:
        every = _every_shape(config, ranks, layers, None, any_tiles=True)
        yield from (shape for shape in every if given.allow(shape.keys))


def _every_shape(
    config: RunConfig,
    ranks: int,
    layers: int,
    grid: tuple[int, int] | None,
    any_tiles: bool,
) -> Iterator[LayoutShape]:
    for replicas in _divisors(ranks):
        if config.batch % replicas:
            continue
        own = ranks // replicas
        for directions in (1, 2) if own > 1 else (1,):
            if config.batch % (replicas * directions):
                continue
            for stages in range(1, min(own, layers) + 1):
                if own % stages == 0 and (stages > 1 or own == 1):
                    yield LayoutShape(replicas, stages, 0, (1, 1), own // stages, directions)
            for spatial in range(1, layers + 1):
                for tiles in range(2, own // spatial + 1):
                    if own > MANY and not any_tiles and not _is_smooth(tiles):
                        continue
                    for behind, shards in _divided(own - spatial * tiles, layers - spatial):
                        for one in _grids(config, tiles, grid):
                            yield LayoutShape(
                                replicas, spatial + behind, spatial, one, shards, directions
                            )


def orders(
    config: RunConfig, shape: LayoutShape, given: GivenKeys = NOTHING_GIVEN
) -> Iterator[Candidate]:
    """Yields the microbatches, pairs and schedules of a shape, nothing computed again.

    What the user gave of the rest of a layout is in each.
    """
    balance = given.get("parallel.balance", None)
    if balance is not None and len(balance) != shape.stages:
        return
    fuse = given.get("parallel.halo.fuse", 1)
    rest = {
        "checkpoint": given.get("memory.checkpoint", "none"),
        "shards_optimizer": given.get("optimizer.shard", False),
        "fuse": fuse if shape.spatial_stages else 1,
        "balance": None if balance is None else tuple(balance),
    }
    most = given.get("parallel.microbatches", MOST_MICROBATCHES)
    counts = (1, 2) if shape.directions == 2 else (1,)
    if "parallel.pairs" in given.values:
        counts = (given.values["parallel.pairs"],)
    for order in _every_order(config, shape, most, counts, given.get("parallel.schedule", None)):
        keys = {
            "parallel.microbatches": order.microbatches,
            "parallel.pairs": order.pairs,
            "parallel.schedule": order.schedule,
        }
        if given.allow(keys):
            yield dataclasses.replace(order, **rest)


def _every_order(
    config: RunConfig, shape: LayoutShape, most: int, counts: Sequence[int], schedule: str | None
) -> Iterator[Candidate]:
    for pairs in counts:
        share, rest = divmod(config.batch, shape.replicas * shape.directions * pairs)
        if rest:
            continue
        for microbatches in _divisors(share):
            if microbatches > most or share // microbatches % shape.local_dp:
                continue
            # One microbatch has one order. In one stage all orders take the same time, and 1f1b has
            # the fewest microbatches in flight.
            usual = "1f1b" if shape.stages == 1 else None
            if microbatches * pairs == 1 or config.task.name != "train":
                usual = "gpipe"
            for name, directions in DIRECTIONS.items():
                only = None if directions > 1 else schedule or usual
                if directions == shape.directions and only in (None, name):
                    yield Candidate(shape, microbatches, pairs, name)


def variants(
    config: RunConfig, candidate: Candidate, given: GivenKeys = NOTHING_GIVEN
) -> Iterator[Candidate]:
    """Yields a layout, and what else it can do with its ranks: recompute, divide the optimiser."""
    yield candidate
    training, shape = config.task.name == "train", candidate.shape
    kinds = ("none", "block", "stage") if training else ("none",)
    copies = shape.replicas > 1 or shape.directions > 1 or max(shape.ranks_of_stages) > 1
    shards = (False, True) if training and copies else (False,)
    for kind, shard in itertools.product(kinds, shards):
        one = dataclasses.replace(candidate, checkpoint=kind, shards_optimizer=shard)
        if one != candidate and given.allow({"memory.checkpoint": kind, "optimizer.shard": shard}):
            yield one


def nearest_counts(
    config: RunConfig, ranks: int, layers: int, most: int, given: GivenKeys = NOTHING_GIVEN
) -> list[int]:
    """Returns the numbers of ranks next below and above ``ranks`` that have a layout at all."""

    def has_any(count: int) -> bool:
        every = shapes(config, count, layers, given)
        return any(next(orders(config, one, given), None) for one in every)

    below = next((n for n in range(ranks - 1, 0, -1) if has_any(n)), None)
    above = next((n for n in range(ranks + 1, min(most, 2 * ranks) + 1) if has_any(n)), None)
    return [count for count in (below, above) if count is not None]


def _divided(ranks: int, layers: int) -> Iterator[tuple[int, int]]:
    """Yields how so many ranks become stages behind the tiles: (stages, ranks of each)."""
    if ranks == 0:
        yield 0, 1
    for stages in range(1, min(ranks, layers) + 1):
        if ranks % stages == 0:
            yield stages, ranks // stages


def _grids(
    config: RunConfig, tiles: int, given: tuple[int, int] | None
) -> tuple[tuple[int, int], ...]:
    if given is not None:
        return (given,) if given[0] * given[1] == tiles else ()
    return _squarest(config.height, config.width, tiles)


@functools.lru_cache(maxsize=4096)
def _squarest(height: int, width: int, tiles: int) -> tuple[tuple[int, int], ...]:
    grids = [(tiles // cols, cols) for cols in _divisors(tiles)]
    fitting = [
        (rows, cols)
        for rows, cols in grids
        if rows <= height and cols <= width and not (height == width and cols > rows)
    ]
    # A tile as square as possible borrows the fewest pixels.
    fitting.sort(key=lambda grid: abs(math.log(height * grid[1] / width / grid[0])))
    return tuple(fitting[:MOST_GRIDS])


@functools.lru_cache(maxsize=4096)
def _divisors(count: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, count + 1) if count % n == 0)


@functools.lru_cache(maxsize=4096)
def _is_smooth(count: int) -> bool:
    for factor in SMOOTH:
        while count % factor == 0:
            count //= factor
    return count == 1


@dataclass(frozen=True)
class Change:
    """Keys of a config that take other values."""

    keys: dict[str, Any]
    """By dotted name, as ``parallel.stages``."""

    @property
    def text(self) -> str:
        """The overrides as a user types them."""
        return " ".join(f"{key}={written(value)}" for key, value in self.keys.items())

    def apply(self, config: RunConfig) -> RunConfig | None:
        """Returns the changed config, or None if its values make no sense together."""
        try:
            return self.applied(config)
        except ConfigError:
            return None

    def applied(self, config: RunConfig) -> RunConfig:
        """Returns the changed config; ConfigError: its values make no sense together."""
        changed: RunConfig = _replaced(config, self.keys)
        return changed


def written(value: Any) -> str:
    """Returns a value as a user types it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value).replace(" ", "")


def _replaced(section: Any, keys: dict[str, Any]) -> Any:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        group, _, name = key.partition(".")
        if name:
            groups.setdefault(group, {})[name] = value
    values = {key: value for key, value in keys.items() if "." not in key}
    values |= {group: _replaced(getattr(section, group), inner) for group, inner in groups.items()}
    return dataclasses.replace(section, **values)
