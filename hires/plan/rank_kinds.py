"""Selects the ranks whose memory is rehearsed; the others take the result of a similar one.

A rehearsal takes 0.1 to 1 s for each microbatch, and a plan may have thousands of ranks:

    4 x 4 tiles, 33 stages, mirrored     48 kinds of ranks: no two hold the same pair of slots
    -> by size, within each stage        tiles differ by a row of pixels and the sides of a halo
    -> WORK node passes                  the largest rank of each group is rehearsed
"""

from __future__ import annotations

import math
from typing import Any

from hires.plan.layout import Box, held_by
from hires.plan.plan import Plan, Stage
from hires.plan.program import edge_messages

KINDS_PER_STAGE = 4
"""Kinds of tiles up to which each is rehearsed; as many as a grid of 2 x 2 can make."""
WORK = 6000
"""Node passes that the rehearsals of one plan may take in all, about 10 s."""
TILED_NODE = 4
"""Passes of a node on one rank that take as long as one of a node in tiles, with its halos."""
START = 50
"""Node passes that take as long as to build one rank."""
# By how much ranks of a group may differ in size, and whether they share the stage of most bytes.
_COARSER = ((0.02, True), (0.1, True), (0.3, True), (0.1, False), (0.5, False), (1.0, False))


def representatives(plan: Plan) -> list[int]:
    """Returns for every rank of a replica the rank whose memory is taken for its own.

    Ranks of equal likeness need the same. Where there are too many kinds, the rank that holds most
    is taken for all of its group, so that the prediction is a little too large and never too small.
    """
    kinds = [likeness(plan, rank) for rank in range(plan.ranks_per_replica)]
    first: dict[Any, int] = {}
    chosen = [first.setdefault(kind, rank) for rank, kind in enumerate(kinds)]
    sizes = [_size(plan, rank, kind) for rank, kind in enumerate(kinds)]
    places = [(kind[0], *(slot[0] for slot in kind[1])) for kind in kinds]
    if len(first) > KINDS_PER_STAGE * len(set(places)):
        largest: dict[Any, int] = {}
        for rank, place in enumerate(places):
            if place not in largest or sum(sizes[rank]) > sum(sizes[largest[place]]):
                largest[place] = rank
        chosen = [largest[place] for place in places]
    for slack, by_stage in _COARSER:
        if sum(_work(plan, rank) for rank in set(chosen)) <= WORK:
            break
        leaders = _leaders(sizes, slack, by_stage)
        chosen = [leaders[rank] for rank in chosen]
    return chosen


def likeness(plan: Plan, rank: int) -> tuple[Any, ...]:
    """Returns what decides the memory of a rank: ranks of equal likeness need the same.

    Those are its actions, the shapes of what it holds in each direction, and the shapes of what it
    sends and receives in all.
    """
    actions = tuple(plan.actions_of(rank))
    edges = [
        (outgoing, math.prod(message.shape))
        for action in actions
        for outgoing in (False, True)
        for message in edge_messages(plan, rank, action, outgoing)
    ]
    slots = [_slot_likeness(plan, rank, slot.direction) for slot in plan.slots_of(rank)]
    return actions, tuple(slots), tuple(sorted(edges))


def _leaders(sizes: list[list[int]], slack: float, by_stage: bool) -> dict[int, int]:
    """Returns for each rank the largest one of its group.

    Args:
        sizes: of every rank, by stage.
        slack: share by which the smallest of a group is below the largest.
        by_stage: whether ranks of a group hold most in the same stage.
    """
    leaders: dict[int, int] = {}
    last: dict[int, int] = {}
    for rank in sorted(range(len(sizes)), key=lambda r: -sum(sizes[r])):
        group = sizes[rank].index(max(sizes[rank])) if by_stage else 0
        leader = last.get(group)
        if leader is None or sum(sizes[rank]) < (1 - slack) * sum(sizes[leader]):
            last[group] = leader = rank
        leaders[rank] = leader
    return leaders


def _size(plan: Plan, rank: int, kind: tuple[Any, ...]) -> list[int]:
    """Returns an estimate of the numbers that a rank holds at its fullest moment, by stage.

    Those are parameters, gradients and momentum, and all values and halos of each microbatch in
    flight.
    """
    sizes = [0] * len(plan.stages)
    for slot, (_, held, halos) in zip(plan.slots_of(rank), kind[1], strict=True):
        stage = plan.stages[slot.stage]
        flight = most = 0
        for action in plan.actions_of(rank):
            if plan.direction_of(action) == slot.direction:
                flight += 1 if action[0] == "F" else -1
                most = max(most, flight)
        numbers = _numbers(plan, stage, held) + sum(map(sum, halos))
        sizes[stage.index] += 3 * stage.params + max(1, most) * numbers
    return sizes


def _numbers(plan: Plan, stage: Stage, held: tuple[tuple[int, ...], ...]) -> int:
    """Returns how many numbers a rank of a stage holds of one microbatch.

    Args:
        plan: of the stage.
        stage: that the rank computes.
        held: samples, rows and columns of each of its values; nothing if it holds all of them.
    """

    def shapes() -> list[list[int]]:
        graph = plan.graph
        each = (graph.by_name[v].shape if v in graph.by_name else graph.input_shape for v in values)
        return [shape or [0] for shape in each]

    values = stage.layout
    whole = plan.remember(("whole shapes", stage.index), shapes)
    if stage.num_ranks == 1:
        return sum(map(math.prod, whole))
    return sum(
        samples * rows * cols * math.prod(shape[1:2])
        for (samples, rows, cols), shape in zip(held, whole, strict=True)
    )


def _work(plan: Plan, rank: int) -> int:
    """Returns how many node passes the rehearsal of a rank takes as long as."""
    total = START
    for action in plan.actions_of(rank):
        stage = plan.stages[plan.slot_of(rank, plan.direction_of(action)).stage]
        total += (stage.last - stage.first) * (TILED_NODE if stage.num_tiles > 1 else 1)
    return total


def _boxes(plan: Plan, stage: Stage, value: str) -> list[Box]:
    key = "held", stage.index, value
    return plan.remember(key, lambda: held_by(plan.graph, stage, value))


def _slot_likeness(plan: Plan, rank: int, direction: int) -> tuple[Any, ...]:
    """Returns what decides the memory of one slot: its stage, the shapes it holds, its halos."""
    slot = plan.slot_of(rank, direction)
    stage = plan.stages[slot.stage]
    shapes = plan.remember(("shapes", stage.index), lambda: _shapes(plan, stage))
    halos = plan.remember(("halo sizes", stage.index), lambda: _halo_sizes(plan, stage))
    return slot.stage, shapes[slot.tile], halos[slot.tile]


def _shapes(plan: Plan, stage: Stage) -> list[tuple[tuple[int, ...], ...]]:
    """Returns the samples, rows and columns of every value that each rank of a stage holds."""
    if stage.num_ranks == 1:
        return [()]
    boxes = [_boxes(plan, stage, value) for value in stage.layout]
    sizes = [[(b.n1 - b.n0, b.r1 - b.r0, b.c1 - b.c0) for b in each] for each in boxes]
    return list(zip(*sizes, strict=True))


def _halo_sizes(plan: Plan, stage: Stage) -> list[tuple[tuple[int, ...], ...]]:
    """Returns how many numbers each tile of a stage sends and receives, by exchange."""
    by_tile: list[list[tuple[int, ...]]] = [[] for _ in range(stage.num_ranks)]
    for op in stage.comm:
        if op.kind != "halo":
            continue
        depth = math.prod(plan.graph.shape(op.value)[:2])
        # Sent and received by tile; the gradient goes the other way and adds no difference.
        sizes: list[tuple[list[int], list[int]]] = [([], []) for _ in by_tile]
        for source, target, r0, r1, c0, c1 in op.messages:
            numbers = depth * (r1 - r0) * (c1 - c0)
            sizes[source][0].append(numbers)
            sizes[target][1].append(numbers)
        for tile, (sent, received) in enumerate(sizes):
            by_tile[tile] += [tuple(sorted(sent)), tuple(sorted(received))]
    return [tuple(sizes) for sizes in by_tile]
