"""Counts the messages of one step: in all, by kind and size, and from rank to rank.

Ranks of one kind make the same calls, so the events of one of each are counted. A collective of n
ranks counts as n messages; an all-reduce of b bytes as 2 (n - 1) b bytes, the least that any
algorithm sends, a broadcast or reduce-scatter as (n - 1) b, a gather as n (n - 1) b. Sums travel in
single precision or better, or as a codec makes them smaller (``comm.codec``).
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hires.core.units import MIB
from hires.plan.event import OF_WORLD, Event, sent_bytes
from hires.plan.groups import groups
from hires.plan.plan import Plan, derived
from hires.plan.program import events
from hires.plan.rank_kinds import callers
from hires.plan.routes import Route

BOUNDS = (1024, 16 * 1024, 256 * 1024, 4 * MIB)
CLASSES = ("below 1 KiB", "1 to 16 KiB", "16 to 256 KiB", "256 KiB to 4 MiB", "4 MiB and more")
CALLED = (
    "send", "recv", "all_gather", "all_reduce", "reduce", "broadcast", "reduce_scatter",
    "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip
"""What ranks call; an agreement, as in the barrier of a step, is an all-reduce of one number."""
_TO_EACH = {"all_reduce": 2, "broadcast": 1, "reduce_scatter": 1}
"""What a rank sends to each of n others in such a collective, in n-ths of its bytes; else all."""


class PlannedCall(NamedTuple):
    """What a rank sends in one call."""

    traffic: str
    stage: int
    """Whose pass it belongs to; -1: none, as at the end of a step."""
    operation: str
    peer: int
    """Of a message the other rank's number less the own one; else the index of the group."""
    num_ranks: int
    """That call it together; 1: a message."""
    num_bytes: int
    """Of a message, or that the rank contributes to a collective."""
    route: Route | None

    def sent_bytes(self, number: int) -> int:
        """Returns what so many calls of it send, of all ranks of the group together."""
        n = self.num_ranks
        return number * self.num_bytes * max(1, n - 1) * _TO_EACH.get(self.operation, n) // n


@derived
def _counted(plan: Plan) -> dict[int, Counter[PlannedCall]]:
    return {}


def counted_events(plan: Plan, rank: int) -> Iterator[Event]:
    """Yields the events of a rank, and counts its calls: the proof reads what is counted."""
    counts: dict[tuple[Any, ...], int] = {}  # plain: there may be many millions of events
    for event in events(plan, rank):
        if event.counts and event.operation not in ("", "recv"):
            what = event.traffic, event.part.action, event.operation, event.peer
            key = *what, event.shape, event.dtype, event.route, event.codec
            counts[key] = counts.get(key, 0) + 1
        yield event
    stages = [slot.stage for slot in plan.slots_of(rank)]
    sizes = [*map(len, groups(plan)), plan.world]  # the last has the index of the world
    calls: Counter[PlannedCall] = Counter()
    for (traffic, action, operation, peer, shape, dtype, route, codec), count in counts.items():
        stage = stages[plan.direction_of(action)] if action else -1
        other, ranks = (peer - rank, 1) if operation == "send" else (peer, sizes[peer])
        num_bytes = sent_bytes(math.prod(shape), dtype, codec)
        calls[PlannedCall(traffic, stage, operation, other, ranks, num_bytes, route)] += count
    _counted(plan)[rank] = calls


def calls_of(plan: Plan, rank: int) -> Counter[PlannedCall]:
    """Returns how often a rank sends what in one step, but for the agreement to begin it."""
    if rank not in _counted(plan):
        deque(counted_events(plan, rank), maxlen=0)
    return _counted(plan)[rank]


@derived
def calls(plan: Plan) -> Counter[PlannedCall]:
    """Returns what all ranks send in one step."""
    sums: Counter[PlannedCall] = Counter()
    for rank, number in callers(plan).items():
        for call, count in calls_of(plan, rank).items():
            sums[call] += number * count
    return sums


def totals(plan: Plan) -> dict[str, Any]:
    """Returns messages and bytes of one step of the world: in all, and by kind, size and route."""
    sums: dict[tuple[str, int, str], tuple[int, int]] = {}
    for call, number in calls(plan).items():
        key = call.traffic, bisect.bisect(BOUNDS, call.num_bytes), str(call.route)
        messages, num_bytes = sums.get(key, (0, 0))
        sums[key] = messages + number, num_bytes + call.sent_bytes(number)
    rows: list[dict[str, Any]] = [
        {"kind": k, "class": CLASSES[c], "route": route, "messages": messages, "bytes": num_bytes}
        for (k, c, route), (messages, num_bytes) in sorted(sums.items())
    ]
    return {name: sum(row[name] for row in rows) for name in ("messages", "bytes")} | {
        "by_route": rows
    }


def backends_of_plan(plan: Plan) -> list[str]:
    """Returns the backends of all routes but those of agreements; that of the plan comes first.

    Evaluations may send what no step does: theirs are among them.
    """
    plans = (plan,) if plan.validation is None else (plan, plan.validation)
    names = {plan.backend: None}
    for one in plans:
        rows = (one.totals or totals(one))["by_route"]
        names |= {row["route"].split(":")[0]: None for row in rows if row["kind"] not in OF_WORLD}
    return [*names]


def planned_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns calls by operation, kind, ``size`` (2^size bytes and more, -1 of none) and route.

    A row has their ``count`` and ``bytes``, those without a codec (``plain_bytes``), and of its
    route the backend and the algorithm.
    """
    sums: dict[tuple[str, str, int, str, str], list[int]] = {}
    for one in events:
        if one.traffic and one.route is not None:
            key = one.operation, one.traffic, one.num_bytes.bit_length() - 1, *one.route.names
            held = sums.setdefault(key, [0, 0, 0])
            held[0] += 1
            held[1] += one.num_bytes
            held[2] += sent_bytes(math.prod(one.shape), one.dtype, "")
    names = ("operation", "kind", "size", "backend", "algorithm", "count", "bytes", "plain_bytes")
    return [dict(zip(names, (*key, *sums[key]), strict=True)) for key in sorted(sums)]


def matrix(plan: Plan) -> list[list[float]]:
    """Returns bytes of one step by source and target rank; collectives count as all to all."""
    sent = [[0.0] * plan.world for _ in range(plan.world)]
    members = [*groups(plan), [*range(plan.world)]]  # the last has the index of the world
    for rank in range(plan.world):
        for call, number in calls_of(plan, rank).items():
            is_message, n = call.num_ranks == 1, call.num_ranks
            each = number * call.num_bytes * (_TO_EACH.get(call.operation, n) / n)
            targets = [rank + call.peer] if is_message else members[call.peer]
            for target in {*targets} - {rank}:
                sent[rank][target] += each
    return sent
