"""Counts the messages of one step: in all, by kind and size, and from rank to rank.

A collective of n ranks counts as n messages; an all-reduce of b bytes as 2 (n - 1) b bytes, the
least that any algorithm sends. Sums travel in single precision or better, those of
gradients as ``comm.dtype`` says.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from hires.core.units import MIB
from hires.plan.event import BYTES
from hires.plan.groups import AGREEMENT, num_holders, sums_of, wide_dtype
from hires.plan.halos import map_shape
from hires.plan.plan import Plan, Stage
from hires.plan.program import pass_comm

BOUNDS = (1024, 16 * 1024, 256 * 1024, 4 * MIB)
CLASSES = ("below 1 KiB", "1 to 16 KiB", "16 to 256 KiB", "256 KiB to 4 MiB", "4 MiB and more")
"""Size classes of messages; the bounds lie between them."""


AGREEMENT_BYTES = math.prod(AGREEMENT.shape) * BYTES[AGREEMENT.dtype]


class PassTraffic(NamedTuple):
    """Messages of one kind that the ranks of one or two stages send in one pass of a microbatch."""

    kind: str
    """``stage``, ``join``, or the kind of a stage's ``CommOp``, as ``halo``."""
    makers: Stage
    readers: Stage
    back: bool
    """Whether gradients go from the readers to the makers."""
    rows: list[list[int]]
    """As the plan holds them: place among the makers, place among the readers, and more."""
    sizes: list[int]
    """Bytes of each row's message."""
    to_all: int = 0
    """In the place of messages: bytes that every rank sends to every other one."""


def pass_traffic(plan: Plan) -> Iterator[PassTraffic]:
    """Yields what every microbatch sends on its way; gradients are summed once a step."""
    graph, size, wide = plan.graph, BYTES[plan.sent_dtype], BYTES[wide_dtype(plan)]
    for back in (False, True) if plan.training else (False,):
        for edge in plan.edges:
            makers, readers = plan.stages[edge.source], plan.stages[edge.target]
            kind = "stage" if makers.num_ranks == readers.num_ranks else "join"
            rows = edge.back if back else edge.messages
            sizes = [math.prod(edge.shape(graph, row)) * size for row in rows]
            yield PassTraffic(kind, makers, readers, back, rows, sizes)
        for stage in plan.stages:
            for op, way_back in pass_comm(plan, stage, back):
                numbers = map_shape(graph, stage, op.value)[:2] if op.moves_pixels else [0]
                each = math.prod(numbers) * BYTES[plan.dtype_of(op.value)]
                sizes = [(r1 - r0) * (c1 - c0) * each for _, _, r0, r1, c0, c1 in op.messages]
                to_all = op.elements * wide
                yield PassTraffic(op.kind, stage, stage, way_back, op.messages, sizes, to_all)


def by_class(plan: Plan) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns messages and bytes of one step of the whole world, by kind and size class."""
    messages: Counter[tuple[str, int]] = Counter()
    total: Counter[tuple[str, int]] = Counter()

    def add(kind: str, size: int, number: int, num_bytes: int) -> None:
        key = kind, bisect.bisect(BOUNDS, size)
        messages[key] += number
        total[key] += num_bytes

    # Every microbatch passes every stage once each way, so no rank is looked at.
    for one in pass_traffic(plan):
        for size, number in Counter(one.sizes).items():
            add(one.kind, size, number * plan.pieces, number * size * plan.pieces)
        if one.to_all:
            number = one.makers.num_ranks * plan.pieces
            add(one.kind, one.to_all, number, number * (one.makers.num_ranks - 1) * one.to_all)
    for stage in plan.stages:
        holders = num_holders(plan, stage.index)
        for one_sum in sums_of(plan, stage.index):
            size = one_sum.elements * BYTES[one_sum.dtype]
            add("gradient", size, holders, holders * int(2 * (holders - 1) / holders * size))
    if plan.scales_loss and plan.world > 1:
        add("agree", AGREEMENT_BYTES, plan.world, 2 * (plan.world - 1) * AGREEMENT_BYTES)
    return {key: (messages[key], total[key]) for key in sorted(messages)}


def totals(plan: Plan) -> dict[str, Any]:
    """Returns messages and bytes of one step of the whole world, in all and by kind."""
    by_kind: dict[str, dict[str, Any]] = {}
    for (kind, _), (messages, num_bytes) in by_class(plan).items():
        entry = by_kind.setdefault(kind, {"messages": 0, "bytes": 0, "backend": plan.backend})
        entry["messages"] += messages
        entry["bytes"] += num_bytes
    return {
        "messages": sum(entry["messages"] for entry in by_kind.values()),
        "bytes": sum(entry["bytes"] for entry in by_kind.values()),
        "by_kind": by_kind,
    }


def matrix(plan: Plan) -> list[list[float]]:
    """Returns bytes of one step by source and target rank; all-reduces count as all to all."""
    sent = [[0.0] * plan.world for _ in range(plan.world)]
    copies = [*itertools.product(range(plan.num_replicas), range(plan.num_directions))]

    def ranks_of(stage: Stage, copy: tuple[int, int]) -> list[int]:
        return [plan.rank_of(*copy, stage.index, place) for place in range(stage.num_ranks)]

    for one, copy in itertools.product(pass_traffic(plan), copies):
        passes = len(plan.microbatches_of(copy[1]))
        makers, readers = ranks_of(one.makers, copy), ranks_of(one.readers, copy)
        for (maker, reader, *_), num_bytes in zip(one.rows, one.sizes, strict=True):
            source, target = makers[maker], readers[reader]
            source, target = (target, source) if one.back else (source, target)
            sent[source][target] += num_bytes * passes
        for source, target in itertools.permutations(makers, 2) if one.to_all else ():
            sent[source][target] += one.to_all * passes
    for stage in plan.stages:
        holders = {rank for copy in copies for rank in ranks_of(stage, copy)}
        for one_sum in sums_of(plan, stage.index):
            share = int(2 * one_sum.elements * BYTES[one_sum.dtype] / len(holders))
            for source, target in itertools.permutations(holders, 2):
                sent[source][target] += share
    if plan.scales_loss:
        for source, target in itertools.permutations(range(plan.world), 2):
            sent[source][target] += int(2 * AGREEMENT_BYTES / plan.world)
    return sent
