"""Generates the changes of a config that a search may try, each kind from near to far.

A kind of change is a ladder: one stage more, twice as many, four times as many. The ladders are
generated lazily, so a search that ends at the first rung never sees the others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.plan.memory import Room

FACTORS = (2, 4)
"""By how much microbatches and tiles are multiplied."""


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
        groups: dict[str, dict[str, Any]] = {}
        for key, value in self.keys.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value
        try:
            changed = {g: dataclasses.replace(getattr(config, g), **v) for g, v in groups.items()}
            return dataclasses.replace(config, **changed)
        except ConfigError:
            return None


Ladder = Iterable[Change]
"""Changes of one kind, from near to far."""


def written(value: Any) -> str:
    """Returns a value as a user types it."""
    return "null" if value is None else str(value).replace(" ", "")


def fewer_ranks(config: RunConfig, layers: int | None) -> list[Ladder]:
    """Returns every smaller number of replicas, stages, tiles and shards, the largest first.

    Args:
        config: that has too many ranks.
        layers: of the network, which has no more stages; None: unknown.
    """
    parallel, most = config.parallel, config.launcher.offered_ranks

    def below(count: int) -> Iterable[int]:
        # Each replica, stage or shard has a rank at least, so more than the offered never fit.
        return range(min(count - 1, most), 0, -1)

    return [
        (Change({"parallel.replicas": n}) for n in below(parallel.replicas)),
        (stages(config, n) for n in below(parallel.stages) if layers is None or n <= layers),
        _trimmed_tiles(config),
        (Change({"parallel.local_dp": n}) for n in below(parallel.local_dp)),
    ]


def less_memory(config: RunConfig, layers: int, room: Room) -> list[Ladder]:
    """Returns single changes that lower the memory.

    First what leaves the ranks as they are, by how little it slows them down. Where a rank needs
    too much, more ranks follow. Where all of them together do, fewer ranks go before all but
    recomputation: each needs its libraries, whatever it holds; more nodes, where a job may have
    them, go first.

    Args:
        config: that does not fit.
        layers: the most stages that the network can be cut into.
        room: what it does not fit into.
    """
    parallel = config.parallel
    microbatches = [
        Change({"parallel.microbatches": factor * parallel.microbatches}) for factor in FACTORS
    ]
    kinds = [k for k in ("block", "stage") if k != config.memory.checkpoint]
    recompute = [
        [Change({"memory.checkpoint": kind})] for kind in kinds if config.task.name == "train"
    ]
    if not room.shared:
        more_tiles = itertools.islice(_more_tiles(config), len(FACTORS))
        return [microbatches, *recompute, _more_stages(config, layers), more_tiles]
    fewer: list[Ladder] = [
        (Change({"parallel.replicas": n}) for n in _halves(parallel.replicas)),
        _fewer_tiles(config),
        (stages(config, n) for n in _halves(parallel.stages)),
    ]
    return [_more_nodes(config), *recompute[:1], *fewer, microbatches, *recompute[1:]]


def stages(config: RunConfig, count: int) -> Change:
    """Returns another number of stages; layers per stage that were given fit no other number."""
    freed = {} if config.parallel.balance is None else {"parallel.balance": None}
    return Change({"parallel.stages": count, **freed})


def _more_stages(config: RunConfig, layers: int) -> Iterator[Change]:
    """Yields one stage more, then twice as many each time, up to what layers and ranks allow."""
    parallel = config.parallel
    replicas = parallel.replicas
    spare = config.launcher.offered_ranks // replicas - parallel.num_ranks // replicas
    most = min(layers, parallel.stages + spare // parallel.local_dp)
    doubled = itertools.takewhile(
        lambda n: n < most, (parallel.stages << shift for shift in itertools.count(1))
    )
    for count in sorted({parallel.stages + 1, most, *doubled}):
        if parallel.stages < count <= most:
            yield stages(config, count)


def _more_nodes(config: RunConfig) -> Iterator[Change]:
    """Yields twice as many nodes each time, up to one for each rank."""
    nodes, ranks = config.launcher.nodes, config.parallel.num_ranks
    while config.launcher.has_jobs and nodes < ranks:
        nodes = min(2 * nodes, ranks)
        yield Change({"launcher.nodes": nodes})


def _halves(count: int) -> Iterator[int]:
    """Yields half of a count, half of that, and so on down to 1."""
    while count > 1:
        count //= 2
        yield count


def _more_tiles(config: RunConfig) -> Iterator[Change]:
    """Yields grids of twice as many tiles each time, as square as may be."""
    grids = _grids(config)
    while True:
        grids = [[r, 2 * c] if c < r else [2 * r, c] for r, c in grids]
        yield _tiles(config, grids)


def _fewer_tiles(config: RunConfig) -> Iterator[Change]:
    """Yields grids of half as many tiles each time, down to one."""
    grids = _grids(config)
    while any(grid != [1, 1] for grid in grids):
        grids = [[r, max(1, c // 2)] if c >= r else [max(1, r // 2), c] for r, c in grids]
        yield _tiles(config, grids)


def _trimmed_tiles(config: RunConfig) -> Iterator[Change]:
    """Yields grids with one row or column less each time, off the longer side of the largest."""
    grids = [list(grid) for grid in _grids(config)]
    while (grid := max(grids, key=lambda grid: grid[0] * grid[1])) != [1, 1]:
        grid[grid[1] > grid[0]] -= 1
        yield _tiles(config, [list(grid) for grid in grids])


def _grids(config: RunConfig) -> list[list[int]]:
    """Returns the grids in ``parallel.tiles``, one of them if all spatial stages share it."""
    tiles: list[Any] = config.parallel.tiles
    return tiles if config.parallel.listed else [tiles]


def _tiles(config: RunConfig, grids: list[list[int]]) -> Change:
    """Returns other grids, written as the config writes its own."""
    return Change({"parallel.tiles": grids if config.parallel.listed else grids[0]})
