"""Words what a layout needs and does not get: ranks of the launcher, cores, memory."""

from __future__ import annotations

import math

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.plan.plan import Finding


def offered(config: RunConfig) -> list[Finding]:
    """Returns an error if a layout has more ranks than the launcher offers.

    Machines without a rank, and nodes with fewer cores than their ranks need, are errors too.
    """
    most = config.offered_ranks
    return ranks_offered(config, config.parallel.num_ranks, f"use parallel=auto ranks={most}")


def ranks_offered(config: RunConfig, ranks: int, remedy: str = "") -> list[Finding]:
    """Returns the same for any layout of so many ranks; ``remedy`` is against too many of them."""
    most, nodes = config.offered_ranks, config.num_nodes
    if nodes > ranks:
        key = "launcher.nodes" if config.launcher.has_jobs else "launcher.hosts"
        given = f"{key}={nodes}" if key == "launcher.nodes" else f"{key} names {nodes}, which"
        return _error(key, f"{given} is more than the ranks of the layout; use at most {ranks}")
    if ranks <= most:
        return _cores(config, ranks)
    return _error(
        "launcher.max_ranks",
        f"the layout has {ranks} ranks, but launcher={config.launcher.name} offers {most} on a "
        f"machine; {remedy or f'use ranks={most}'}, or allow them with launcher.max_ranks={ranks}",
    )


def _error(key: str, text: str) -> list[Finding]:
    return [Finding("error", key, text)]


def other_layouts(config: RunConfig) -> str:
    """Returns the command that lists the layouts that fit, for a rank that needs too much."""
    return (
        f"`hires plan --choose ranks={config.parallel.num_ranks} KEY=VALUE...` with the other keys "
        f"of this run lists the layouts that fit, or how many ranks would do"
    )


def fewer_on_a_node(config: RunConfig) -> str:
    """Returns what lowers the need for a node's own memory beside its GPUs, in words."""
    nodes, ranks = config.num_nodes, config.parallel.num_ranks
    if config.launcher.has_jobs and nodes < ranks:
        return f"use launcher.nodes={nodes + 1} or more, a smaller image or a smaller batch"
    return "use a smaller image, a smaller batch or fewer ranks"


def _cores(config: RunConfig, ranks: int) -> list[Finding]:
    cores, threads = config.cluster.cores, config.launcher.threads
    if not config.launcher.has_jobs or cores is None:
        return []
    most = max(spread(ranks, config.launcher.nodes))
    if most * threads <= cores:
        return []
    fitting = []
    if cores >= threads:
        fitting.append(f"launcher.nodes={math.ceil(ranks / (cores // threads))}")
    if cores >= most:
        fitting.append(f"launcher.threads={cores // most}")
    return _error(
        "cluster.cores",
        f"{most} ranks of {threads} threads on a node need {most * threads} cores, but "
        f"cluster.cores={cores}; use {' or '.join(fitting) or 'fewer ranks'}",
    )
