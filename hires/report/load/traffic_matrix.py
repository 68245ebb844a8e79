"""Counts the messages of a step by sender, receiver and size, from the plan.

Counts equal those of ``hires.plan.planner.totals``, without walking every microbatch: all passes of
a stage in one direction send the same.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from hires.core.units import MIB
from hires.plan.event import BYTES
from hires.plan.groups import held_stages, sums_of
from hires.plan.plan import Plan, Stage
from hires.plan.program import pass_comm

KIB = 1024
BOUNDS = (KIB, 16 * KIB, 256 * KIB, 4 * MIB)
CLASSES = ("below 1 KiB", "1 to 16 KiB", "16 to 256 KiB", "256 KiB to 4 MiB", "4 MiB and more")
"""Size classes of messages; the bounds lie between them."""


class Flow(NamedTuple):
    """Equal messages of one step from one rank of the first replica to another."""

    source: int
    target: int
    kind: str
    """``halo``, ``stage``, ``join``, ``norm``, ``reduce``, ``share``, ``loss`` or ``gradient``."""
    num_bytes: int
    """Of one message."""
    messages: int


def size_class(num_bytes: float) -> int:
    """Returns the index of the class of a message."""
    return sum(num_bytes >= bound for bound in BOUNDS)


def flows(plan: Plan) -> Iterator[Flow]:
    """Yields what the ranks of the first replica send to each other in one step.

    Gradients, which are summed over replicas too, come from :func:`gradient_sums`. A gather of n
    ranks is a message from each to every other.
    """
    for direction in range(plan.num_directions):
        passes = len(plan.microbatches_of(direction))
        for back in (False, True) if plan.training else (False,):
            for stage in plan.stages:
                for flow in _inside(plan, stage, direction, back):
                    yield flow._replace(messages=passes * flow.messages)
            for flow in _between(plan, direction, back):
                yield flow._replace(messages=passes * flow.messages)


def gradient_sums(plan: Plan) -> Iterator[tuple[list[int], int]]:
    """Yields the ranks and bytes of each sum of gradients over all holders of a stage."""
    wide = max(BYTES[plan.dtype], BYTES["float32"])
    holders: dict[int, list[int]] = {}
    for rank in range(plan.world) if plan.training else ():
        for stage in held_stages(plan, rank):
            holders.setdefault(stage, []).append(rank)
    for stage, ranks in sorted(holders.items()):
        for one in sums_of(plan, stage):
            yield ranks, one.elements * wide


def matrix(plan: Plan) -> list[list[float]]:
    """Returns bytes of one step by source and target rank of the whole world.

    An all-reduce of b bytes sends at least 2 (n - 1) b / n from each of n ranks; each is taken to
    send the same to every other.
    """
    sent = [[0.0] * plan.world for _ in range(plan.world)]
    for flow in flows(plan):
        for first in range(0, plan.world, plan.ranks_per_replica):
            sent[first + flow.source][first + flow.target] += flow.num_bytes * flow.messages
    for ranks, num_bytes in gradient_sums(plan):
        for source, target in itertools.permutations(ranks, 2):
            sent[source][target] += int(2 * num_bytes / len(ranks))
    return sent


def by_class(plan: Plan) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns messages and bytes of one step of the whole world, by kind and size class.

    A sum of gradients counts as one message from each holder.
    """
    messages: Counter[tuple[str, int]] = Counter()
    total: Counter[tuple[str, int]] = Counter()
    for flow in flows(plan):
        key = flow.kind, size_class(flow.num_bytes)
        messages[key] += flow.messages * plan.num_replicas
        total[key] += flow.messages * flow.num_bytes * plan.num_replicas
    for ranks, num_bytes in gradient_sums(plan):
        key = "gradient", size_class(num_bytes)
        messages[key] += len(ranks)
        total[key] += 2 * (len(ranks) - 1) * num_bytes
    return {key: (messages[key], total[key]) for key in sorted(messages)}


def _inside(plan: Plan, stage: Stage, direction: int, back: bool) -> Iterator[Flow]:
    """Yields what the ranks of a stage send to each other in one pass."""
    size = BYTES[plan.dtype]
    wide = max(size, BYTES["float32"])
    ranks = [plan.rank_of(0, direction, stage.index, i) for i in range(stage.num_ranks)]
    for op, way_back in pass_comm(plan, stage, back):
        if op.kind != "halo":
            for source, target in itertools.permutations(ranks, 2):
                yield Flow(source, target, op.kind, op.elements * wide, 1)
            continue
        images, channels, *_ = plan.graph.shape(op.value)
        for source, target, r0, r1, c0, c1 in op.messages:
            first, last = (target, source) if way_back else (source, target)
            num_bytes = images * channels * (r1 - r0) * (c1 - c0) * size
            yield Flow(ranks[first], ranks[last], "halo", num_bytes, 1)


def _between(plan: Plan, direction: int, back: bool) -> Iterator[Flow]:
    """Yields what stages send to each other in one pass."""
    for edge in plan.edges:
        makers, readers = plan.stages[edge.source], plan.stages[edge.target]
        kind = "stage" if makers.num_ranks == readers.num_ranks else "join"
        # Messages of the backward pass name the maker's tile first, too, though the reader sends.
        for row in edge.back if back else edge.messages:
            source = plan.rank_of(0, direction, makers.index, row[0])
            target = plan.rank_of(0, direction, readers.index, row[1])
            if back:
                source, target = target, source
            num_bytes = math.prod(edge.shape(plan.graph, row)) * BYTES[plan.dtype]
            yield Flow(source, target, kind, num_bytes, 1)
