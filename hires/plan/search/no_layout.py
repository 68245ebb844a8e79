"""Words why a search found no layout: none has so many ranks, or none fits, and what would."""

from __future__ import annotations

import itertools
from collections.abc import Set as AbstractSet

from hires.core.config.run_config import RunConfig
from hires.core.units import size
from hires.plan.memory import Room
from hires.plan.search.candidates import nearest_counts, orders, shapes, variants
from hires.plan.search.choice import DECIDED, Choice
from hires.plan.search.estimate import Estimator

MOST_SHAPES = 64
"""Of each number of ranks that are looked at for one that fits."""
MOST_TIMES = 16
"""Times the ranks that were asked for, up to which is looked."""


def limit_bytes(room: Room, ranks: int) -> float:
    """Returns the bytes that one of so many ranks may need by its own, its libraries left out."""
    if room.rank_bytes is not None:
        return room.rank_bytes
    if room.machine_bytes is None:
        return float("inf")
    places = room.nodes * max(1, room.devices)
    return room.machine_bytes / -(-ranks // places) - room.libraries_bytes


def none_of(config: RunConfig, layers: int, ranks: int, fixed: AbstractSet[str]) -> str:
    """Returns why no layout has so many ranks, and which numbers of them have one."""
    near = nearest_counts(config, ranks, layers, config.launcher.offered_ranks)
    others = " or ".join(f"ranks={count}" for count in near)
    kept = ", ".join(sorted(fixed & DECIDED))
    return (
        f"no layout of this network uses ranks={ranks}{f' with the given {kept}' if kept else ''}: "
        f"replicas and microbatches divide batch={config.batch}, tiles cut image={config.height}x"
        f"{config.width}, stages the {layers} layers; use {others or 'fewer ranks'}"
        f"{', or leave keys out' if kept else ''}"
    )


def nothing_fits(estimator: Estimator, room: Room, choice: Choice) -> str:
    """Returns the least memory that a rank needs, and the fewest ranks that would do."""
    config, ranks = estimator.config, choice.ranks
    least = min([choice.least_bytes, *(option.peak_bytes for option in choice.out)])
    fewest = _fewest_ranks(estimator, ranks, room)
    more = "no number of ranks that was tried would do: use a smaller image, batch or network"
    if fewest is not None:
        more = f"ranks={fewest} would do, by the estimate"
    given = f"memory.limit={config.memory.limit}"
    if room.rank_bytes is None:
        each = size(max(0.0, limit_bytes(room, ranks)))
        given = f"{each} for each rank of {size(room.machine_bytes or 0)}"
    return (
        f"no layout of ranks={ranks} fits {given}: the least that its fullest rank needs is about "
        f"{size(least)}; {more}"
    )


def _fewest_ranks(estimator: Estimator, ranks: int, room: Room) -> int | None:
    """Returns the fewest ranks above ``ranks`` with a layout that fits by its estimate."""
    config, layers = estimator.config, len(estimator.layers)
    for count in range(ranks + 1, min(config.launcher.offered_ranks, MOST_TIMES * ranks) + 1):
        limit = limit_bytes(room, count)
        for shape in itertools.islice(shapes(config, count, layers), MOST_SHAPES):
            for order in [*orders(config, shape)][-1:]:  # the most microbatches need the least
                sizes = (
                    estimator.estimate(one).peak_bytes
                    for one in variants(config, order)
                    if one.fuse == 1
                )
                if min(sizes) <= limit:
                    return count
    return None
