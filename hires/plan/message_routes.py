"""Gives every message of a plan its route, once, from facts that all ranks share.

The plan holds one row for each case that its step has, so that ranks look up what was proved and
need no table:

    operation   place    ranks  near  class   bytes     route
    send        tiles        4     2  bytes   28672     shm:message
    send        stages       2     1  bytes   1605632   gloo:message
    all_reduce  holders      4     4  float   94208     shm

``near`` ranks of the message are on one node. A size stands for a message, or for what a rank
contributes to a collective.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hires.core.config.launcher_config import node_starts
from hires.plan.event import BYTES
from hires.plan.groups import AGREEMENT, NORM, groups, num_tile_groups
from hires.plan.plan import Plan, derived
from hires.plan.route_choice import BUCKETS, HOLDERS, OF_ALL, TILES, RouteChoice
from hires.plan.routes import Route, parse_route
from hires.plan.table_rules import dtype_class

SUMMED = ("loss",)
"""Kinds of ``CommOp`` whose numbers are summed; those of the other collectives are gathered."""


class RouteCase(NamedTuple):
    """Messages that have one route where as many of their ranks are on one node."""

    operation: str
    place: str
    ranks: int
    """Of the group, also of a message between two of its tiles; between stages 2."""
    dtype: str
    num_bytes: int


def routes_from(plan: Plan, choice: RouteChoice, cases: Iterable[RouteCase]) -> list[list[Any]]:
    """Returns the routes of the messages of a connected plan."""
    rows: dict[tuple[Any, ...], Route] = {}
    agreements = (AGREEMENT, NORM) if plan.clips_gradients else (AGREEMENT,)
    of_world = (
        RouteCase("all_reduce", OF_ALL, plan.world, one.dtype, BYTES[one.dtype])
        for one in agreements
    )
    for case in dict.fromkeys((*cases, *of_world) if plan.world > 1 else ()):
        kind = dtype_class(case.operation, case.dtype)
        for near in _nears(plan, case):
            key = *case[:3], near, kind, case.num_bytes
            rows[key] = rows.get(key) or choice.route(*case[:3], near, *case[3:])
    return [[*case, str(route)] for case, route in sorted(rows.items())]


def _nears(plan: Plan, case: RouteCase) -> set[int]:
    """Returns how many ranks of such a message may be on one node."""
    if case.operation == "send":
        return {2} if plan.num_nodes == 1 else {1, 2}
    if case.place == OF_ALL or plan.num_nodes == 1:
        return {near_most(plan, range(case.ranks))}
    count, every = num_tile_groups(plan), groups(plan)
    members = every[:count] if case.place == TILES else every[count:]
    return {near_most(plan, own) for own in members if len(own) == case.ranks}


@derived
def send_route(
    plan: Plan, place: str, ranks: int, near: int, dtype: str, numbers: int
) -> Route | None:
    """Returns the route of a message; None: the plan has none for it."""
    case = "send", place, ranks, near, dtype_class("send", dtype), numbers * BYTES[dtype]
    return _table(plan).get(case)


@derived
def group_route(
    plan: Plan, operation: str, group: int, dtype: str, numbers: int, is_bucket: bool = False
) -> Route | None:
    """Returns the route of a collective of a group, -1 is the world; None likewise.

    ``is_bucket``: it sums several tensors.
    """
    place = OF_ALL if group < 0 else TILES if group < num_tile_groups(plan) else HOLDERS
    place = BUCKETS if is_bucket else place
    ranks = range(plan.world) if group < 0 else groups(plan)[group]
    kind, num_bytes = dtype_class(operation, dtype), numbers * BYTES[dtype]
    return _table(plan).get((operation, place, len(ranks), near_most(plan, ranks), kind, num_bytes))


def routes_of(plan: Plan, case: RouteCase) -> str:
    """Returns the routes of a message in words, within a node first."""
    kind, held = dtype_class(case.operation, case.dtype), _table(plan)
    keys = ((*case[:3], near, kind, case.num_bytes) for near in range(case.ranks, 0, -1))
    return " / ".join(dict.fromkeys(str(held[key]) for key in keys if key in held)) or plan.backend


def near_pair(plan: Plan, rank: int, other: int) -> int:
    """Returns how many of two ranks are on one node."""
    if plan.num_nodes == 1:
        return 2
    starts = _node_starts(plan)
    return 1 + (bisect.bisect(starts, rank) == bisect.bisect(starts, other))


def near_most(plan: Plan, ranks: Sequence[int]) -> int:
    """Returns how many of some ranks are on one node, of the node with most."""
    starts = _node_starts(plan)
    nodes = [bisect.bisect(starts, rank) for rank in ranks]
    return max(nodes.count(node) for node in set(nodes))


def node_place(plan: Plan, rank: int) -> tuple[int, int]:
    """Returns the first rank of a rank's node and of the next one, relative to its own.

    (0, 0) where routes within a node and between nodes are the same.
    """
    if not _tells_nodes(plan):
        return 0, 0
    bounds = [0, *_node_starts(plan), plan.world]
    node = bisect.bisect(bounds, rank)
    return bounds[node - 1] - rank, bounds[node] - rank


def replicas_apart(plan: Plan) -> list[int]:
    """Returns the first rank of one replica for each way in which nodes divide replicas.

    Of those that nodes divide alike all messages have the same routes.
    """
    if not _tells_nodes(plan):
        return [0]
    size, first = plan.ranks_per_replica, dict[tuple[int, ...], int]()
    for rank in range(0, plan.world, size):
        cuts = tuple(start - rank for start in _node_starts(plan) if rank < start < rank + size)
        first.setdefault(cuts, rank)
    return [*first.values()]


def backends_of_plan(plan: Plan) -> list[str]:
    """Returns the backends of all routes but those of agreements; that of the plan comes first."""
    routes = (route for case, route in _table(plan).items() if case[1] != OF_ALL)
    return [*dict.fromkeys([plan.backend, *(route.backend for route in routes)])]


@derived
def _table(plan: Plan) -> dict[tuple[Any, ...], Route]:
    return {tuple(row[:-1]): parse_route(row[-1]) for row in plan.routes}


@derived
def _tells_nodes(plan: Plan) -> bool:
    routes: dict[tuple[Any, ...], Route] = {}
    sends = ((case, route) for case, route in _table(plan).items() if case[0] == "send")
    return any(routes.setdefault((*c[:3], *c[4:]), route) != route for c, route in sends)


@derived
def _node_starts(plan: Plan) -> tuple[int, ...]:
    return node_starts(plan.world, plan.num_nodes)
