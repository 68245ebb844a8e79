"""Words the advice of a layout search: too many ranks for the launcher, too little memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.units import size
from hires.plan.graph import Graph
from hires.plan.memory import LIBRARIES_BYTES, Room, least_bytes, room_of
from hires.plan.partition import layer_starts
from hires.plan.plan import Finding, Plan
from hires.plan.search.layout_search import Budget, Measure, Search, fewer_ranks, less_memory


def offered(config: RunConfig, layers: int | None = None) -> list[Finding]:
    """Returns an error if a layout has more ranks than the launcher offers, with what would fit.

    Machines without a rank, and nodes with fewer cores than their ranks need, are errors too.
    """
    ranks = config.parallel.num_ranks
    if ranks <= config.launcher.offered_ranks:
        return ranks_offered(config, ranks)
    fitting = Search(config).first_of_each(fewer_ranks(config, layers))
    remedy = (
        f"use {' or '.join(change.text for change in fitting)}"
        if fitting
        else "none of replicas, stages, tiles and local_dp is enough alone: lower two of them"
    )
    return ranks_offered(config, ranks, remedy)


def ranks_offered(config: RunConfig, ranks: int, remedy: str = "") -> list[Finding]:
    """Returns the same for any layout of so many ranks; ``remedy`` is against too many of them."""
    most, nodes = config.launcher.offered_ranks, config.launcher.num_nodes
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


def would_fit(
    config: RunConfig,
    shortage: str,
    graph: Graph,
    planned: Callable[[RunConfig], Plan | None],
    budget: Budget,
) -> Finding:
    """Returns the error of a plan that does not fit its memory, with the changes that would.

    ``shortage`` is what does not fit; ``planned`` returns a config's plan with memory, or None.
    """
    room = room_of(config)

    def predict(changed: RunConfig) -> Measure | None:
        plan = planned(changed)
        if plan is None:
            return None
        there = dataclasses.replace(room, nodes=changed.launcher.num_nodes)
        return Measure(there.shortage(changed, plan) is None, needs(there, plan))

    search = Search(config, lambda changed: out_of_reach(changed, room, graph), predict, budget)
    trials = search.nearest(less_memory(config, len(layer_starts(graph)), room))
    if trials:
        rest = f"{', or '.join(trial.words for trial in trials)} would fit"
    else:
        # What was predicted is cached, so the next search begins where this one ended.
        again = "plan again to try more, " if budget.spent else ""
        rest = f"{search.summary()}; {again}combine such changes, or use a smaller image, batch or"
        rest += " network"
    return Finding("error", "memory.limit", f"{shortage}; {rest}")


def fewer_on_a_node(config: RunConfig) -> str:
    """Returns what lowers the need for a node's own memory beside its GPUs, in words."""
    nodes, ranks = config.launcher.num_nodes, config.parallel.num_ranks
    if config.launcher.has_jobs and nodes < ranks:
        return f"use launcher.nodes={nodes + 1} or more, a smaller image or a smaller batch"
    return "use a smaller image, a smaller batch or fewer ranks"


def needs(room: Room, plan: Plan) -> str:
    """Returns what a plan needs of what there is too little of, in words."""
    where = f" on a {room.place}" if room.source else " in all"
    return f"{size(room.needed(plan))}{where if room.shared else ''}"


def out_of_reach(config: RunConfig, room: Room, graph: Graph) -> str:
    """Returns why a config needs too much by its numbers alone, or nothing if it may fit."""
    nodes, ranks = config.launcher.num_nodes, config.parallel.num_ranks
    least = least_bytes(config, graph) * config.parallel.replicas
    if room.rank_bytes is not None:
        each = least // ranks
        return f"at least {size(each)} on a rank" if each > room.rank_bytes else ""
    if room.machine_bytes is None:
        return ""
    if room.devices:
        each = least // min(ranks, nodes * room.devices)
        return f"at least {size(each)} on a GPU" if each > room.machine_bytes else ""
    libraries = max(spread(ranks, nodes)) * LIBRARIES_BYTES
    if libraries > room.machine_bytes:
        return f"{size(libraries)} for libraries alone"
    every = (ranks * LIBRARIES_BYTES + least) // nodes
    return f"at least {size(every)}" if every > room.machine_bytes else ""


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
