"""Counts the messages of one step: in all, by kind and size, and from rank to rank.

A collective of n ranks counts as n messages; an all-reduce of b bytes as 2 (n - 1) b bytes, the
least that any algorithm sends, a broadcast or reduce-scatter as (n - 1) b. Sums travel in single
precision or better, those of gradients as ``comm.dtype`` says.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hires.core.units import MIB
from hires.plan.event import BYTES, OF_WORLD, WORLD, Event
from hires.plan.gradient_sums import sums_of
from hires.plan.groups import AGREEMENT, gradient_group, groups, num_tile_groups, wide_dtype
from hires.plan.halos import map_shape
from hires.plan.message_routes import group_route, is_on_one_node, route_of
from hires.plan.ownership import publications
from hires.plan.plan import Plan, Stage, derived
from hires.plan.program import edge_kind, events, pass_comm
from hires.plan.routes import Route

BOUNDS = (1024, 16 * 1024, 256 * 1024, 4 * MIB)
CLASSES = ("below 1 KiB", "1 to 16 KiB", "16 to 256 KiB", "256 KiB to 4 MiB", "4 MiB and more")
"""Size classes of messages; the bounds lie between them."""


class PassTraffic(NamedTuple):
    """Messages of one kind that the ranks of one or two stages send in one pass of a microbatch."""

    kind: str
    """``stage``, ``join``, or the kind of a stage's ``CommOp``, as ``halo``."""
    makers: Stage
    readers: Stage
    back: bool
    """Whether gradients go from the readers to the makers."""
    sizes: list[int]
    """Bytes of each message."""
    dtype: str
    """Of the messages."""
    to_all: int = 0
    """In the place of messages: bytes that every rank sends to every other one."""
    operation: str = ""
    """The collective that does it."""


def pass_traffic(plan: Plan) -> Iterator[PassTraffic]:
    """Yields what every microbatch sends on its way; gradients are summed once a step."""
    graph, wide = plan.graph, BYTES[wide_dtype(plan.dtype)]
    for back in (False, True) if plan.training else (False,):
        for edge in plan.edges:
            makers, readers = plan.stages[edge.source], plan.stages[edge.target]
            kind = edge_kind(plan, edge)
            rows, dtype = edge.back if back else edge.messages, plan.dtype_of(edge.value)
            whole, width = edge.shape(graph), BYTES[dtype]
            sizes = [math.prod(row.box.shape(whole)) * width for row in rows]
            yield PassTraffic(kind, makers, readers, back, sizes, dtype)
        for stage in plan.stages:
            for op, way_back in pass_comm(plan, stage, back):
                whole = [*map_shape(graph, stage, op.value)] if op.moves_pixels else []
                dtype = plan.dtype_of(op.value)
                width, to_all = BYTES[dtype], op.elements * wide
                sizes = [math.prod(row.box.shape(whole)) * width for row in op.messages]
                facts = sizes, dtype, to_all, op.operation
                yield PassTraffic(op.kind, stage, stage, way_back, *facts)


CALLED = (
    "send", "recv", "all_gather", "all_reduce", "reduce", "broadcast", "reduce_scatter",
    "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip
"""What ranks call; an agreement, as in the barrier of a step, is an all-reduce of one number."""


def planned_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns calls by operation, kind, ``size`` (2^size bytes and more, -1 of none) and route.

    A row has their ``count`` and ``bytes``, and of its route the backend and the algorithm.
    """
    sums: dict[tuple[str, str, int, str, str], list[int]] = {}
    for one in events:
        if one.traffic and one.route is not None:
            key = one.operation, one.traffic, one.num_bytes.bit_length() - 1, *one.route.names
            held = sums.setdefault(key, [0, 0])
            held[0] += 1
            held[1] += one.num_bytes
    names = ("operation", "kind", "size", "backend", "algorithm", "count", "bytes")
    return [dict(zip(names, (*key, *sums[key]), strict=True)) for key in sorted(sums)]


@derived
def by_route(plan: Plan) -> dict[tuple[str, int, str], tuple[int, int]]:
    """Returns messages and bytes of one step of the world, by kind, size class and route.

    Where a message travels in another way within a node than between nodes, both ways are named.
    """
    sums: dict[tuple[str, int, str], tuple[int, int]] = {}
    for one in traffic_sums(plan):
        routes = " / ".join(map(str, one.routes))
        key = one.kind, bisect.bisect(BOUNDS, one.size), routes
        before = sums.get(key, (0, 0))
        sums[key] = before[0] + one.number, before[1] + one.num_bytes
    return {key: sums[key] for key in sorted(sums)}


class TrafficSum(NamedTuple):
    """Messages of one kind and size, in one step of the world."""

    kind: str
    number: int
    num_bytes: int
    """Of all of them."""
    size: int
    """Bytes of a message, or that a rank contributes to a collective."""
    routes: list[Route]
    """That within a node first, where another one leads between nodes."""


@derived
def traffic_sums(plan: Plan) -> list[TrafficSum]:
    """Returns what a step sends but for the agreement to begin it."""
    return [*_pass_sums(plan), *_step_sums(plan)]


def backends_of_plan(plan: Plan) -> list[str]:
    """Returns the backends of all routes but those of agreements; that of the plan comes first."""
    sums = (one for one in traffic_sums(plan) if one.kind not in OF_WORLD)
    backends = (route.backend for one in sums for route in one.routes)
    return [*dict.fromkeys([plan.backend, *backends])]


def _pass_sums(plan: Plan) -> Iterator[TrafficSum]:
    # Every microbatch passes every stage once each way, so no rank is looked at.
    wide, near = wide_dtype(plan.dtype), (True, False) if plan.num_nodes > 1 else (True,)
    for one in pass_traffic(plan):
        for size, number in Counter(one.sizes).items():
            number *= plan.pieces
            ways = dict.fromkeys(route_of(plan, "send", 2, n, one.dtype, size) for n in near)
            yield TrafficSum(one.kind, number, number * size, size, [*ways])
        if one.to_all:
            every = groups(plan)[: num_tile_groups(plan)]
            of_stage, ranks = every[one.makers.index :: len(plan.stages)], one.makers.num_ranks
            number, routes = (
                ranks * plan.pieces,
                _routes(plan, of_stage, one.operation, wide, one.to_all),
            )
            sent_bytes = number * (ranks - 1) * one.to_all
            yield TrafficSum(one.kind, number, sent_bytes, one.to_all, routes)


def _step_sums(plan: Plan) -> Iterator[TrafficSum]:
    for stage in plan.stages:
        ranks = groups(plan)[gradient_group(plan, stage.index)]
        holders = len(ranks)
        for one in sums_of(plan, stage.index):
            size, is_bucket = one.elements * BYTES[one.dtype], not one.alone and not one.scatters
            routes = _routes(plan, [ranks], one.operation, one.dtype, size, is_bucket)
            sent_bytes = (1 if one.scatters else 2) * (holders - 1) * size
            yield TrafficSum("gradient", holders, sent_bytes, size, routes)
        for update in publications(plan, stage.index):
            width = BYTES[update.dtype]
            size, sent_bytes = update.elements * width, (holders - 1) * update.total * width
            routes = _routes(plan, [ranks], update.operation, update.dtype, size)
            yield TrafficSum("parameter", holders, sent_bytes, size, routes)
    agreements = [("agree", plan.scales_loss), ("grad_norm", plan.clips_gradients)]
    for kind, is_wanted in agreements if plan.world > 1 else ():
        if is_wanted:  # each has the same size
            size = BYTES[AGREEMENT]
            sent_bytes = 2 * (plan.world - 1) * size
            route = group_route(plan, "all_reduce", WORLD, AGREEMENT, 1)
            assert route is not None
            yield TrafficSum(kind, plan.world, sent_bytes, size, [route])


def _routes(
    plan: Plan,
    groups: Sequence[Sequence[int]],
    operation: str,
    dtype: str,
    size: int,
    is_bucket: bool = False,
) -> list[Route]:
    """Returns the routes of a collective of some groups, within a node first."""
    near, ranks = {is_on_one_node(plan, ranks) for ranks in groups}, len(groups[0])
    routes = (
        route_of(plan, operation, ranks, one, dtype, size, is_bucket)
        for one in sorted(near, reverse=True)
    )
    return [*dict.fromkeys(routes)]


def totals(plan: Plan) -> dict[str, Any]:
    """Returns messages and bytes of one step of the world: in all, and by kind and route."""
    rows: list[dict[str, Any]] = [
        {"kind": k, "class": CLASSES[c], "route": route, "messages": messages, "bytes": num_bytes}
        for (k, c, route), (messages, num_bytes) in by_route(plan).items()
    ]
    sums = {name: sum(row[name] for row in rows) for name in ("messages", "bytes")}
    return {**sums, "by_route": rows}


def matrix(plan: Plan) -> list[list[float]]:
    """Returns bytes of one step by source and target rank; collectives count as all to all."""
    sent = [[0.0] * plan.world for _ in range(plan.world)]
    members = [*groups(plan), [*range(plan.world)]]  # the last has the index of the world
    for rank in range(plan.world):
        for event in events(plan, rank):
            if not event.counts or event.operation == "recv":
                continue
            ranks = [rank, event.peer] if event.operation == "send" else members[event.peer]
            parts = {"all_reduce": 2, "broadcast": 1, "reduce_scatter": 1}.get(event.operation)
            for target in {*ranks} - {rank}:
                sent[rank][target] += event.num_bytes * (parts / len(ranks) if parts else 1)
    return sent
