"""Explains what a layout, or a search for one, needs and does not get, and what would help."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.units import size
from hires.plan.memory import Room
from hires.plan.plan import Finding
from hires.plan.search.candidates import Given, nearest_counts, orders, shapes, variants
from hires.plan.search.choice import Choice, Rehearsal
from hires.plan.search.estimate import Estimator

MOST_REASONS = 3
MOST_LOOKED = 1000
"""Layouts of each number of ranks that are estimated for one that fits."""
MOST_TIMES = 16
"""Times the ranks that were asked for, up to which is looked."""


def offered(config: RunConfig) -> list[Finding]:
    """Returns an error if ranks, machines or cores of a layout are not those that are offered."""
    most = config.offered_ranks
    return ranks_offered(config, config.parallel.num_processes, f"use parallel=auto ranks={most}")


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


def fewer_on_a_node(config: RunConfig) -> str:
    """Returns what lowers the need for a node's own memory beside its GPUs, in words."""
    nodes, ranks = config.num_nodes, config.parallel.num_processes
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


def none_of(config: RunConfig, layers: int, ranks: int, given: Given) -> str:
    """Returns why no layout has so many ranks, and which numbers of them have one."""
    near = nearest_counts(config, ranks, layers, config.offered_ranks, given)
    others = " or ".join(f"ranks={count}" for count in near)
    kept = " ".join(f"{key}={value}" for key, value in sorted(given.items()))
    return (
        f"no layout of this network uses ranks={ranks}{f' with the given {kept}' if kept else ''}: "
        f"replicas and microbatches divide batch={config.batch}, tiles cut image={config.height}x"
        f"{config.width}, stages the {layers} layers; use "
        f"{' or '.join(filter(None, (others, kept and 'other keys'))) or 'fewer ranks'}"
    )


def no_plan(choice: Choice, errors: Iterable[str]) -> str:
    """Returns why no layout at all makes a plan: the most frequent of all their ``errors``."""
    remedies = {error.split(";")[0]: error for error in errors}
    reasons = [reason for reason, _ in choice.reasons.most_common(MOST_REASONS)]
    texts = "; ".join(remedies.get(reason, reason) for reason in reasons)
    return f"no layout of ranks={choice.ranks} is possible: {texts}"


def cannot_run(ranks: int, failures: Sequence[str]) -> str:
    """Returns why ranks cannot run the steps of any layout."""
    every = "; ".join([*dict.fromkeys(failures)][:MOST_REASONS])
    return f"no layout of ranks={ranks} can run: {every}"


def nothing_fits(estimator: Estimator, choice: Choice, given: Given, rehearsal: Rehearsal) -> str:
    """Returns the least memory that a rank needs, and how many ranks would do."""
    config, ranks, limit, room = estimator.config, choice.ranks, rehearsal.limit, rehearsal.rooms[0]
    if rehearsal.beside:
        remedy = fewer_on_a_node(rehearsal.planned[0][0].config)
        return f"no layout of ranks={ranks} fits: {rehearsal.beside}; {remedy}"
    if limit <= 0:
        return (
            f"the libraries of ranks={ranks} alone take {size(ranks * room.libraries_bytes)}, more "
            f"than the memory has; use fewer ranks"
        )
    rehearsed = [option.peak_bytes for option in choice.out if option.rehearsed]
    # What was estimated to need less does not fit either, for all that is known.
    least = max(limit, min([choice.least_bytes * rehearsal.correction(), *rehearsed]))
    given_limit = f"memory.limit={config.memory.limit}"
    if room.rank_bytes is None or limit < room.rank_bytes:
        given_limit = f"{size(limit)} for each rank of {size(room.machine_bytes or 0)}"
    most = min(config.offered_ranks, MOST_TIMES * ranks)
    counts = [count for n in range(1, 10) if (count := ranks << n) <= most]
    if limit != room.rank_bytes:  # where ranks share a memory, fewer may fit, too
        counts += [ranks >> n for n in range(1, ranks.bit_length())]
    fits = (n for n in counts if _fits(estimator, n, room, given, rehearsal.correction()))
    enough, last = next(fits, None), max([ranks, *counts])
    more = f"up to ranks={last} none would do: use a smaller image, batch or network"
    more = more if enough is None else f"ranks={enough} would do"
    return (
        f"no layout of ranks={ranks} fits {given_limit}: the fullest rank needs about "
        f"{size(least)} at the least, by the estimate; {more}"
    )


def _fits(estimator: Estimator, ranks: int, room: Room, given: Given, correction: float) -> bool:
    config, limit = estimator.config, room.bytes_of_one(ranks)
    every = (
        one
        for shape in shapes(config, ranks, len(estimator.layers), given)
        for order in orders(config, shape, given)
        for one in variants(config, order, given)
    )
    looked = itertools.islice(every, MOST_LOOKED)
    return any(correction * estimator.estimate(one).peak_bytes <= limit for one in looked)
