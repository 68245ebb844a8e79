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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.schedules import SCHEDULES, Pipeline, usual_schedule
from hires.plan.simulation.node_work import most_in_flight

MOST_GRIDS = 6
"""Grids of one number of tiles that are listed, the most square ones first."""
MOST_MICROBATCHES = 32
"""Of one model pass; more shorten a bubble that is small by then."""
FUSED, RECOMPUTED = (1, 2, 4), ("none", "block", "stage")
"""Windowed layers that one exchange of halos serves, and what is computed again."""
SMOOTH = (2, 3, 5)
"""In a replica of more than ``MANY`` ranks, tiles of a stage are products of these alone, unless
the user gave their grid or no layout would be left."""
MANY = 64

Given = Mapping[str, Any]
"""Keys that the user gave, with their values: layouts with other values are not looked at."""
NOTHING_GIVEN: Given = {}

Values = Callable[[RunConfig, "LayoutShape"], Sequence[Any]]
"""(config, shape) -> values of a key that may be worth a look, the usual one first."""


def _dimension(key: str, default: Any = dataclasses.MISSING, **values: Values) -> Any:
    """Returns a field of a layout, and what a search needs of the key that it stands for.

    To add a dimension: a field of :class:`Candidate`, and its values. ``listed``: those to look at
    in any case; ``estimated``: slower ones, to try where a layout needs too much memory;
    ``planned``: those with which good layouts are planned again, since the estimate says little of
    their cost.
    """
    return dataclasses.field(default=default, metadata={"key": key, **values})


@dataclass(frozen=True)
class LayoutShape:
    """Which ranks a layout has, whatever they do in which order."""

    replicas: int = _dimension("parallel.replicas")
    stages: int = _dimension("parallel.stages")
    spatial_stages: int = _dimension("parallel.spatial_stages")
    grid: tuple[int, int] = _dimension("parallel.tiles")
    local_dp: int = _dimension("parallel.local_dp")
    directions: int = _dimension("parallel.directions")

    @property
    def tiles(self) -> int:
        """Ranks that share an image in a spatial stage."""
        return self.grid[0] * self.grid[1]

    @property
    def ranks_of_stages(self) -> list[int]:
        """Ranks of each stage of one replica and direction."""
        behind = self.stages - self.spatial_stages
        return [self.tiles] * self.spatial_stages + [self.local_dp] * behind


def _divided_updates(config: RunConfig, shape: LayoutShape) -> Sequence[bool]:
    copies = shape.replicas > 1 or shape.directions > 1 or max(shape.ranks_of_stages) > 1
    return (False, True) if config.task.name == "train" and copies else (False,)


@dataclass(frozen=True)
class Candidate:
    """One layout."""

    shape: LayoutShape
    microbatches: int = _dimension("parallel.microbatches", 1)
    pairs: int = _dimension("parallel.pairs", 1)
    schedule: str = _dimension("parallel.schedule", usual_schedule())
    balance: tuple[int, ...] | None = _dimension("parallel.balance", None)
    fuse: int = _dimension(
        "parallel.halo.fuse", 1, planned=lambda _, shape: FUSED if shape.spatial_stages else (1,)
    )
    checkpoint: str = _dimension(
        "memory.checkpoint",
        "none",
        estimated=lambda config, _: RECOMPUTED if config.task.name == "train" else ("none",),
    )
    shards_optimizer: bool = _dimension(
        "optimizer.shard", False, listed=_divided_updates, planned=_divided_updates
    )

    @property
    def pieces(self) -> int:
        """Microbatches of the whole world in one step."""
        shape = self.shape
        return shape.replicas * shape.directions * self.pairs * self.microbatches

    @property
    def num_actions(self) -> int:
        """Actions of all ranks of a replica, forward and backward as one."""
        passes = self.pairs * self.microbatches * self.shape.directions
        return sum(self.shape.ranks_of_stages) * passes

    @property
    def keys(self) -> dict[str, Any]:
        """The keys that it decides, as a config holds their values."""
        values = vars(self.shape) | vars(self)
        own = ((key, values[name]) for name, key in KEYS.items())
        return {key: list(value) if isinstance(value, tuple) else value for key, value in own}

    @property
    def overrides(self) -> str:
        """The keys that differ from their defaults, as one types them."""
        shape = LayoutShape(1, 1, min(1, self.shape.spatial_stages), (1, 1), 1, 1)
        usual = Candidate(shape).keys
        own = ((key, value) for key, value in self.keys.items() if value != usual[key])
        return " ".join(f"{key}={written(value)}" for key, value in own) or "parallel=single"

    def applied(self, config: RunConfig) -> RunConfig:
        """Returns the config with this layout; ConfigError: its values make no sense together."""
        changed: RunConfig = _replaced(config, {"parallel.name": "single", **self.keys})
        return changed


_SHAPE = {one.name: one.metadata["key"] for one in dataclasses.fields(LayoutShape)}
_ORDER = {one.name: one.metadata["key"] for one in dataclasses.fields(Candidate)[1:]}
KEYS = _SHAPE | _ORDER
"""Field of a layout -> the key that a search decides."""
DECIDED = frozenset(KEYS.values())
_LISTED = ("microbatches", "pairs", "schedule")
"""Fields whose values :func:`orders` lists."""


def candidate_of(keys: Mapping[str, Any]) -> Candidate:
    """Returns the layout with some :attr:`Candidate.keys`; KeyError: one is missing."""
    own = {name: keys[key] for name, key in KEYS.items()}
    own = {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()}
    shape = LayoutShape(**{one.name: own.pop(one.name) for one in dataclasses.fields(LayoutShape)})
    return Candidate(shape, **own)


def written(value: Any) -> str:
    """Returns a value as a user types it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value).replace(" ", "")


def shapes(
    config: RunConfig, ranks: int, layers: int, given: Given = NOTHING_GIVEN
) -> Iterator[LayoutShape]:
    """Yields the shapes of so many ranks whose tiles have pixels, and replicas divide the batch."""
    grid = given.get("parallel.tiles")
    for any_tiles in (False, True) if grid is None else (True,):
        every = _every_shape(config, ranks, layers, grid, any_tiles)
        listed = (shape for shape in every if _allows(given, Candidate(shape), *_SHAPE))
        first = next(listed, None)
        if first is not None:
            yield from (first, *listed)
            return


def _allows(given: Given, candidate: Candidate, *fields: str) -> bool:
    keys = candidate.keys
    return all(given.get(KEYS[name], keys[KEYS[name]]) == keys[KEYS[name]] for name in fields)


def _every_shape(
    config: RunConfig, ranks: int, layers: int, grid: list[int] | None, any_tiles: bool
) -> Iterator[LayoutShape]:
    for replicas, directions in itertools.product(_divisors(ranks), (1, 2)):
        own = ranks // replicas
        if config.batch % (replicas * directions) or own < directions:
            continue
        for stages in range(1, min(own, layers) + 1):
            if own % stages == 0 and (stages > 1 or own == 1):
                yield LayoutShape(replicas, stages, 0, (1, 1), own // stages, directions)
        for spatial in range(1, layers + 1):
            for tiles in range(2, own // spatial + 1):
                if own > MANY and not any_tiles and not _is_smooth(tiles):
                    continue
                grids = _squarest(config.height, config.width, tiles)
                if grid is not None:
                    grids = ((grid[0], grid[1]),) if math.prod(grid) == tiles else ()
                for behind, shards in _divided(own - spatial * tiles, layers - spatial):
                    place = replicas, spatial + behind, spatial
                    yield from (LayoutShape(*place, one, shards, directions) for one in grids)


def orders(
    config: RunConfig, shape: LayoutShape, given: Given = NOTHING_GIVEN
) -> Iterator[Candidate]:
    """Yields the microbatches, pairs and schedules of a shape, the rest as given or by default."""
    rest = {n: given[key] for n, key in _ORDER.items() if n not in _LISTED and key in given}
    if (balance := rest.get("balance")) is not None:
        if len(balance) != shape.stages:
            return
        rest["balance"] = tuple(balance)
    if not shape.spatial_stages:
        rest["fuse"] = 1
    most = given.get("parallel.microbatches", MOST_MICROBATCHES)
    pairs_of = [given.get("parallel.pairs", 1)]
    if shape.directions == 2 and "parallel.pairs" not in given:
        pairs_of = [1, 2]
    for pairs in pairs_of:
        share, left = divmod(config.batch, shape.replicas * shape.directions * pairs)
        for microbatches in _divisors(share) if not left else ():
            if microbatches > most or share // microbatches % shape.local_dp:
                continue
            # One microbatch has one order. In one stage all orders take the same time.
            usual = _fewest_in_flight() if shape.stages == 1 else None
            if microbatches * pairs == 1 or config.task.name != "train":
                usual = usual_schedule()
            for name in SCHEDULES:
                directions = SCHEDULES[name].directions
                only = None if directions > 1 else given.get("parallel.schedule", usual)
                one = Candidate(shape, microbatches, pairs, name, **rest)
                is_listed = directions == shape.directions and only in (None, name)
                if is_listed and _allows(given, one, *_LISTED):
                    yield one
                    yield from others(config, one, given, "listed")


@functools.cache
def _fewest_in_flight() -> str:
    """Returns the schedule in which a rank that holds all stages keeps the fewest microbatches."""
    alone, names = Pipeline((((0,),),), 2), (n for n in SCHEDULES if SCHEDULES[n].directions == 1)
    return min(names, key=lambda name: most_in_flight(SCHEDULES[name].order(alone)[0]))


def variants(
    config: RunConfig, candidate: Candidate, given: Given = NOTHING_GIVEN
) -> Iterator[Candidate]:
    """Yields a layout, and what else it can do to need less memory: recompute."""
    yield candidate
    yield from others(config, candidate, given, "estimated")


def others(config: RunConfig, candidate: Candidate, given: Given, how: str) -> Iterator[Candidate]:
    """Yields a layout with other values of the keys that are ``estimated``, or ``planned``."""
    fields = [one for one in dataclasses.fields(Candidate) if how in one.metadata]
    names = [one.name for one in fields]
    values_of = [one.metadata[how](config, candidate.shape) for one in fields]
    for values in itertools.product(*values_of):
        one = dataclasses.replace(candidate, **dict(zip(names, values, strict=True)))
        if one != candidate and _allows(given, one, *names):
            yield one


def nearest_counts(
    config: RunConfig, ranks: int, layers: int, most: int, given: Given = NOTHING_GIVEN
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


def _replaced(section: Any, keys: Mapping[str, Any]) -> Any:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        group, _, name = key.partition(".")
        if name:
            groups.setdefault(group, {})[name] = value
    values = {key: value for key, value in keys.items() if "." not in key}
    values |= {group: _replaced(getattr(section, group), inner) for group, inner in groups.items()}
    return dataclasses.replace(section, **values)
