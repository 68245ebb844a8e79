"""Does the launcher offer as many ranks as a layout has, and which smaller layout would do?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from hires.core.config.cluster_config import spread
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.plan.key_conflicts import check_together
from hires.plan.plan import Finding


def offered(config: RunConfig, layers: int | None = None) -> list[Finding]:
    """Returns an error if a layout has more ranks than the launcher, with what would fit.

    Nor may there be machines on which no rank would run, or fewer cores than the ranks of one ask.

    Args:
        config: the run.
        layers: of its network, as far as they are known: it has no more stages.
    """
    most, ranks = config.launcher.offered_ranks, config.parallel.num_ranks
    nodes = config.launcher.num_nodes
    if nodes > ranks:
        key = "launcher.nodes" if config.launcher.name == "slurm" else "launcher.hosts"
        given = f"{key}={nodes}" if key == "launcher.nodes" else f"{key} names {nodes}, which"
        text = f"{given} is more than the ranks of the layout; use at most {ranks}"
        return [Finding("error", key, text)]
    if ranks <= most:
        return _cores(config)
    changes = (_replicas(config), _stages(config, layers), _tiles(config), _shards(config))
    fitting = [change for change in changes if change]
    remedy = (
        f"use {' or '.join(fitting)}"
        if fitting
        else "none of replicas, stages, tiles and local_dp is enough alone: lower two of them"
    )
    text = (
        f"the layout has {ranks} ranks, but launcher={config.launcher.name} offers "
        f"{most} on a machine; {remedy}, "
        f"or allow them with launcher.max_ranks={ranks}"
    )
    return [Finding("error", "launcher.max_ranks", text)]


def _cores(config: RunConfig) -> list[Finding]:
    """Returns an error if a job asks for more cores of a node than the cluster's nodes have."""
    cores, threads = config.cluster.cores, config.launcher.threads
    if config.launcher.name != "slurm" or cores is None:
        return []
    ranks = config.parallel.num_ranks
    most = max(spread(ranks, config.launcher.nodes))
    if most * threads <= cores:
        return []
    fitting = []
    if cores >= threads:
        fitting.append(f"launcher.nodes={math.ceil(ranks / (cores // threads))}")
    if cores >= most:
        fitting.append(f"launcher.threads={cores // most}")
    text = (
        f"{most} ranks of {threads} threads on a node need {most * threads} cores, but "
        f"cluster.cores={cores}; use {' or '.join(fitting) or 'fewer ranks'}"
    )
    return [Finding("error", "cluster.cores", text)]


def _replicas(config: RunConfig) -> str:
    """Returns the most replicas that fit and divide the batch; nothing if there are none."""
    most = min(config.parallel.replicas - 1, config.launcher.offered_ranks)
    for count in range(most, 0, -1):
        layout = _fitting(config, replicas=count)
        if layout is not None and config.batch % (layout.pieces * layout.local_dp) == 0:
            return f"parallel.replicas={count}"
    return ""


def _stages(config: RunConfig, layers: int | None) -> str:
    """Returns the most stages that fit; nothing if there are none.

    Layers per stage that were given fit no other number.
    """
    freed = " with parallel.balance=null" if config.parallel.balance is not None else ""
    # Every stage has a rank, so that no more stages than ranks can fit.
    most = min(config.parallel.stages - 1, config.launcher.offered_ranks)
    for count in range(most if layers is None else min(most, layers), 0, -1):
        if _fitting(config, stages=count, balance=None) is not None:
            return f"parallel.stages={count}{freed}"
    return ""


def _shards(config: RunConfig) -> str:
    """Returns the most ranks behind the tiles that fit and divide a microbatch, or nothing."""
    samples, rest = divmod(config.batch, config.parallel.pieces)
    most = min(config.parallel.local_dp - 1, config.launcher.offered_ranks)
    for count in range(most, 0, -1):
        # A batch that does not divide into microbatches must change anyway.
        if (rest or samples % count == 0) and _fitting(config, local_dp=count) is not None:
            return f"parallel.local_dp={count}"
    return ""


def _tiles(config: RunConfig) -> str:
    """Returns the first grids that fit, as rows and columns leave them; nothing if there are none.

    The longer side of the largest grid goes first, so that grids stay as square as they are.
    """
    for grids in _smaller(config.parallel.tiles):
        layout = _fitting(config, tiles=grids)
        if layout is not None and all(
            rows <= config.height and cols <= config.width for rows, cols in layout.grids
        ):
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
    """Returns the changed layout if its keys go together as before and its ranks are offered."""
    try:
        layout = dataclasses.replace(config.parallel, **keys)
    except ConfigError:
        return None
    if layout.num_ranks > config.launcher.offered_ranks:
        return None
    changed = dataclasses.replace(config, parallel=layout)
    return layout if len(check_together(changed)) <= len(check_together(config)) else None
