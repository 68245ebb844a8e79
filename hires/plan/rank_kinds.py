"""Finds ranks that are alike: with the same program, or with the same memory.

A rehearsal of a rank's memory takes 0.1 to 1 s for each microbatch, and a plan may have thousands
of ranks, so the others take the result of a similar one:

    4 x 4 tiles, 33 stages, mirrored     48 kinds of ranks: no two hold the same pair of slots
    -> by size, within each stage        tiles differ by a row of pixels and the sides of a halo
    -> WORK node passes                  the largest rank of each group is rehearsed
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Hashable
from typing import Any

from hires.plan.event import BYTES, POSTS
from hires.plan.factors import map_shape
from hires.plan.groups import wide_dtype
from hires.plan.layout import held_by, shares_of
from hires.plan.message_routes import first_ranks
from hires.plan.plan import Plan, Stage, derived
from hires.plan.program import events, halo_rows, links
from hires.plan.rules import WHOLE, dims_of
from hires.plan.simulation.node_work import kept_bytes, most_in_flight, value_bytes
from hires.plan.updates import updated_elements

KINDS_PER_STAGE = 4
"""Kinds of tiles up to which each is rehearsed; as many as a grid of 2 x 2 can make."""
WORK = 6000
"""Node passes that the rehearsals of one plan may take in all, about 10 s."""
TILED_NODE = 4
"""Passes of a node on one rank that take as long as one of a node in tiles, with its halos."""
START = 50
"""Node passes that take as long as to build one rank."""
SLACKS = 0.02, 0.1, 0.3, 0.5, 1.0
"""By how much the ranks of a group may differ in size, until there are few groups enough."""


@derived
def equal_programs(plan: Plan, start: int = 0) -> list[int]:
    """Returns for every rank of a replica the first one with the same program, peers shifted.

    Ranks count from the first of the replica, which is rank ``start`` of the world. A program is a
    function of the rank's actions and stages and, relative to its own place, of the rows of its
    halos and edges.
    """
    ids: dict[Hashable, int] = {}
    halos: list[list[list[int]]] = []  # by stage and tile: the rows of each exchange, as a number
    for stage in plan.stages:
        halos.append([[] for _ in range(stage.num_ranks)])
        for op in stage.comm:
            rows = halo_rows(plan, stage, op) if op.moves_pixels else {}
            for tile, peers in rows.items():
                own = ((one.tile - tile, one.is_source, one.shape) for one in peers)
                key = id(op), tuple(own)
                halos[-1][tile].append(ids.setdefault(key, len(ids)))
    first: dict[Hashable, int] = {}
    kinds = []
    for rank in range(plan.ranks_per_replica):
        parts: list[Hashable] = [tuple(plan.actions_of(rank)), _node_place(plan, start + rank)]
        for _, direction, held, tile in plan.slots_of(rank):
            parts += [held, tuple(halos[held][tile])]
            for back, outgoing in itertools.product((False, True), repeat=2):
                for edge, stage_there, peers in links(plan, back)[held, outgoing].get(tile, ()):
                    ranks = (plan.rank_of(0, direction, stage_there, one.tile) for one in peers)
                    places = tuple(peer - rank for peer in ranks)
                    parts.append((back, outgoing, edge, places, tuple(one.shape for one in peers)))
        kinds.append(first.setdefault(tuple(parts), rank))
    return kinds


def replicas_apart(plan: Plan) -> Counter[int]:
    """Returns the first rank of one replica for each way in which nodes divide replicas.

    Of those that nodes divide alike, which are counted, all messages have the same routes.
    """
    if not _tells_nodes(plan):
        return Counter({0: plan.num_replicas})
    size, first = plan.ranks_per_replica, dict[tuple[int, ...], int]()
    alike: Counter[int] = Counter()
    for rank in range(0, plan.world, size):
        cuts = tuple(start - rank for start in first_ranks(plan) if rank < start < rank + size)
        alike[first.setdefault(cuts, rank)] += 1
    return alike


def callers(plan: Plan) -> Counter[int]:
    """Returns one rank for each program, and how many ranks of the world it stands for."""
    counts: Counter[int] = Counter()
    for start, replicas in replicas_apart(plan).items():
        for rank in equal_programs(plan, start):
            counts[start + rank] += replicas
    return counts


def _node_place(plan: Plan, rank: int) -> tuple[int, int]:
    # The first rank of a rank's node and of the next one, relative to its own; (0, 0) where routes
    # within a node and between nodes are the same.
    if not _tells_nodes(plan):
        return 0, 0
    bounds = [0, *first_ranks(plan), plan.world]
    node = bisect.bisect(bounds, rank)
    return bounds[node - 1] - rank, bounds[node] - rank


@derived
def _tells_nodes(plan: Plan) -> bool:
    return plan.num_nodes > 1 and any(rule.same_node is not None for rule in plan.routes)


def rehearsed_ranks(plan: Plan) -> list[int]:
    """Returns for every rank of a replica the rank whose memory is taken for its own.

    Ranks with the same actions and stages, whose values, messages and part of the update have the
    same shapes, need the same. Where there are too many kinds, the rank that holds most
    by a rough count is taken for all of its group, so that the prediction is rather too large.
    """
    first: dict[Any, int] = {}
    chosen, places = list[int](), list[Hashable]()
    for rank, program in enumerate(equal_programs(plan)):
        slots = plan.slots_of(rank)
        places.append((tuple(plan.actions_of(rank)), *(slot.stage for slot in slots)))
        shapes = [_lengths(plan, plan.stages[slot.stage])[slot.tile] for slot in slots]
        owned = updated_elements(plan, rank) if plan.shards_optimizer else 0
        kind = places[-1], *shapes, _posted(plan, program), owned
        chosen.append(first.setdefault(kind, rank))
    size_of = {rank: _size(plan, rank) for rank in first.values()}
    sizes = [size_of[rank] for rank in chosen]
    by_size = sorted(range(len(places)), key=lambda rank: -sizes[rank])
    if len(first) > KINDS_PER_STAGE * len(set(places)):
        largest: dict[Any, int] = {}
        for rank in by_size:
            largest.setdefault(places[rank], rank)
        chosen = [largest[place] for place in places]
    for slack in SLACKS:
        if sum(_work(plan, rank) for rank in set(chosen)) <= WORK:
            break
        leader, leaders = by_size[0], dict[int, int]()
        for rank in by_size:  # the largest first
            if sizes[rank] < (1 - slack) * sizes[leader]:
                leader = rank
            leaders[rank] = leader
        chosen = [leaders[rank] for rank in chosen]
    return chosen


def rehearsal_work(plan: Plan) -> int:
    """Returns the node passes that the rehearsals of a plan's memory take."""
    return sum(_work(plan, rank) for rank in set(rehearsed_ranks(plan)))


@derived
def _posted(plan: Plan, rank: int) -> tuple[Any, ...]:
    """Returns the messages of a rank in a step, without the numbers of its peers."""
    posts = (event for event in events(plan, rank) if event.role in POSTS)
    return tuple(sorted((e.kind, e.part.action, e.part.node, math.prod(e.shape)) for e in posts))


def _size(plan: Plan, rank: int) -> float:
    """Returns about how many bytes a rank holds at its fullest moment.

    Parameters, gradients, the optimiser's states, halos, and what each microbatch in flight keeps;
    of those that are computed again one alone.
    """
    copies = 2 + plan.optimizer_states if plan.training else 1
    halos = sum(n for *_, node, n in _posted(plan, equal_programs(plan)[rank]) if node)
    size: float = halos * BYTES[plan.dtype] / len(plan.actions_of(rank))
    for slot in plan.slots_of(rank):
        stage, actions = plan.stages[slot.stage], plan.actions_of(rank)
        own = [action for action in actions if plan.direction_of(action) == slot.direction]
        once = stage.segments or not plan.training
        kept = sum(
            shares_of(plan, stage, value)[slot.tile] * num_bytes
            for value in stage.layout
            if (num_bytes := _kept_bytes(plan).get(value))
        )
        size += copies * stage.params * BYTES[wide_dtype(plan.dtype)]
        size += (1 if once else most_in_flight(own)) * kept
    return size


@derived
def _kept_bytes(plan: Plan) -> dict[str, int]:
    graph, dtype = plan.graph, plan.dtype
    if plan.training:
        return kept_bytes(graph, dtype)
    values = (node.name for node in graph.nodes if node.shape is not None)
    return {value: value_bytes(graph, value, dtype) for value in values}


def _work(plan: Plan, rank: int) -> int:
    stages = [plan.stages[slot.stage] for slot in plan.slots_of(rank)]
    passes = [
        (stage.last - stage.first) * (TILED_NODE if stage.num_tiles > 1 else 1) for stage in stages
    ]
    return START + sum(passes[plan.direction_of(action)] for action in plan.actions_of(rank))


@derived
def _lengths(plan: Plan, stage: Stage) -> list[tuple[Hashable, ...]]:
    """Returns what decides the shapes of all values on each rank: samples, rows and columns."""
    sizes: dict[Hashable, str] = {}  # values of one size are cut alike
    for value, layout in stage.layout.items():
        if layout != WHOLE and not plan.graph.is_list(value):
            samples, _, *pixels = map_shape(dims_of(plan.graph, stage, value))
            sizes.setdefault((samples, *pixels), value)
    lengths = (
        [box.shape([0, 0]) for box in boxes]
        for boxes in (held_by(plan.graph, stage, value) for value in sizes.values())
    )
    return [*zip(*lengths, strict=True)] or [()] * stage.num_ranks
