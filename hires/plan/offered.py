"""Does the launcher offer as many ranks as a layout has, and which smaller layout would do?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hires.core.config import RunConfig
from hires.core.errors import ConfigError
from hires.core.layout import ParallelConfig
from hires.plan.plan import Finding


def offered(config: RunConfig) -> list[Finding]:
    """Returns an error if a layout has more ranks than the launcher, with what would fit.

    Nor may a job have nodes on which no rank would run.
    """
    most, ranks = config.launcher.offered_ranks, config.parallel.num_ranks
    nodes = config.launcher.nodes
    if config.launcher.name == "slurm" and nodes > ranks:
        text = f"launcher.nodes={nodes} is more than the ranks of the layout; use at most {ranks}"
        return [Finding("error", "launcher.nodes", text)]
    if ranks <= most:
        return []
    fitting = [change for change in (_replicas(config), _stages(config), _tiles(config)) if change]
    remedy = (
        f"use {' or '.join(fitting)}"
        if fitting
        else "none of replicas, stages and tiles is enough alone: lower two of them"
    )
    text = (
        f"the layout has {ranks} ranks, but launcher=local offers {most} on a machine; {remedy}, "
        f"or allow them with launcher.max_ranks={ranks}"
    )
    return [Finding("error", "launcher.max_ranks", text)]


def _replicas(config: RunConfig) -> str:
    """Returns the most replicas that fit and divide the batch; nothing if there are none."""
    for count in range(config.parallel.replicas - 1, 0, -1):
        layout = _fitting(config, replicas=count)
        if layout is not None and config.batch % layout.pieces == 0:
            return f"parallel.replicas={count}"
    return ""


def _stages(config: RunConfig) -> str:
    """Returns the most stages that fit; nothing if there are none.

    Layers per stage that were given fit no other number.
    """
    freed = " with parallel.balance=null" if config.parallel.balance is not None else ""
    for count in range(config.parallel.stages - 1, 0, -1):
        if _fitting(config, stages=count, balance=None) is not None:
            return f"parallel.stages={count}{freed}"
    return ""


def _tiles(config: RunConfig) -> str:
    """Returns the first grids that fit, as rows and columns leave them; nothing if there are none.

    The longer side of the largest grid goes first, so that grids stay as square as they are.
    """
    for grids in _smaller(config.parallel.tiles):
        if _fitting(config, tiles=grids) is not None:
            return f"parallel.tiles={grids}".replace(" ", "")
    return ""


def _smaller(tiles: Any) -> Iterator[Any]:
    """Yields grids with one row or column less each time, written as ``tiles`` is."""
    many = isinstance(tiles[0], list)
    grids = [list(grid) for grid in tiles] if many else [list(tiles)]
    while (grid := max(grids, key=lambda grid: grid[0] * grid[1])) != [1, 1]:
        grid[grid[1] > grid[0]] -= 1
        yield [list(grid) for grid in grids] if many else list(grid)


def _fitting(config: RunConfig, **keys: Any) -> ParallelConfig | None:
    """Returns the changed layout if its keys go together and its ranks are offered."""
    try:
        layout = dataclasses.replace(config.parallel, **keys)
    except ConfigError:
        return None
    alone = layout.num_ranks == layout.replicas  # two directions need two ranks
    fits = layout.num_ranks <= config.launcher.offered_ranks and not (
        alone and layout.directions > 1
    )
    return layout if fits else None
