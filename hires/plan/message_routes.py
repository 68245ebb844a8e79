"""Gives every message of a plan its route, from facts that all ranks share.

The plan holds the rules of its tuning table that the ranks of the run can follow, so that ranks
look up what was proved and need no table. The first rule that holds a message decides:

    operation   ranks  same node  class   bytes     route
    send            2  yes        bytes   28672     shm:message
    send            2  no         bytes   1605632   gloo:message
    all_reduce      4  yes        float   94208     shm

A size stands for a message, or for what a rank contributes to a collective.

On a stream a message that its other side does not take holds up those behind it
(:mod:`hires.plan.step_order`), so messages that must pass each other have communicators of their
own, the channels: in each direction of a replica one for the halos of a stage, and one for each two
stages and each way between them. What a rank posts in one call on one channel is one group call, so
the tiles of a halo exchange need no order among each other.

    stage 0 (2 tiles)            stage 1 (2 tiles)             channels of one direction
    rank 0 == F0, F1 =========>  rank 2                        1  halos of stage 0: ranks 0 and 1
       ||    <======== B0, B1 ==   ||                          2  halos of stage 1: ranks 2 and 3
    rank 1 ===================>  rank 3                        3  stage 0 to 1: ranks 0 to 3
                                                               4  stage 1 to 0: ranks 0 to 3
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hires.core.config.launcher_config import node_starts
from hires.plan.event import WORLD, sent_bytes
from hires.plan.groups import groups
from hires.plan.hardware import CUDA, GLOO, NCCL
from hires.plan.plan import Finding, Plan, derived
from hires.plan.routes import CHANNEL, FLAT, MESSAGE, OWN, STREAMED, Route, dtype_class
from hires.plan.tuning_table import Case, first_route


@derived
def route_of(
    plan: Plan,
    operation: str,
    ranks: int,
    same_node: bool,
    dtype: str,
    num_bytes: int,
    is_bucket: bool = False,
) -> Route:
    """Returns the route of a message or collective; ``is_bucket``: it sums several tensors."""
    kind = dtype_class(operation, dtype)
    case = Case(operation, ranks, same_node, plan.device, kind, num_bytes)
    route = first_route(plan.routes, case) or Route(_fallback(plan, plan.device))
    if route.algorithm not in (OWN, MESSAGE):
        return route
    if operation == "send":
        return route._replace(algorithm=CHANNEL if route.backend in STREAMED else MESSAGE)
    return route._replace(algorithm=FLAT if is_bucket else OWN)


def send_route(
    plan: Plan, rank: int, peer: int, dtype: str, elements: int, codec: str = ""
) -> Route:
    """Returns the route of a message between two ranks."""
    same_node = is_on_one_node(plan, sorted((rank, peer)))
    return route_of(plan, "send", 2, same_node, dtype, sent_bytes(elements, dtype, codec))


@derived
def group_route(
    plan: Plan,
    operation: str,
    group: int,
    dtype: str,
    elements: int,
    is_bucket: bool = False,
    codec: str = "",
) -> Route | None:
    """Returns the route of a collective of a group; None: it is of one rank.

    Sums of codes only move bytes, over the backend of gathers.
    """
    if group == WORLD:
        # One number of the host. The way of agreements may depend on no table: the first of them
        # compares the tables, and one ends a run in which a rank could not go on.
        return Route(_fallback(plan, "cpu")) if plan.world > 1 else None
    ranks = groups(plan)[group]
    if len(ranks) == 1:
        return None
    same_node, num_bytes = is_on_one_node(plan, ranks), sent_bytes(elements, dtype, codec)
    if codec and operation != "broadcast":
        way = route_of(plan, "all_gather", len(ranks), same_node, "uint8", num_bytes)
        return Route(way.backend)
    return route_of(plan, operation, len(ranks), same_node, dtype, num_bytes, is_bucket)


def is_on_one_node(plan: Plan, ranks: Sequence[int]) -> bool:
    """Whether some ranks, in ascending order, are on one node."""
    starts = first_ranks(plan)
    return not starts or bisect.bisect(starts, ranks[0]) == bisect.bisect(starts, ranks[-1])


@derived
def first_ranks(plan: Plan) -> tuple[int, ...]:
    """Returns the first rank of each node but the first one."""
    return node_starts(plan.world, plan.num_nodes)


def _fallback(plan: Plan, device: str) -> str:
    # The backend of what no rule holds, for tensors of a device.
    return GLOO if plan.backend == NCCL and device != CUDA else plan.backend


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable that limits the queues between a process and its GPU, which its streams share."""
MOST_QUEUES = 32
"""Most that CUDA allows."""

Key = tuple[int, int, int]
"""(direction, source stage, target stage) of the messages; both stages are equal for halos."""


Ends = tuple[tuple[int, int], tuple[int, int]]
"""Of a message: (stage, tile) of its source and of its target."""


class Channel(NamedTuple):
    """A communicator and what it carries."""

    what: str
    pairs: tuple[tuple[int, int], ...]
    """(source, target) of its messages, as ranks."""

    @property
    def ranks(self) -> list[int]:
        """Those that send or receive on it, in ascending order."""
        return sorted({rank for pair in self.pairs for rank in pair})


def channel_of(plan: Plan, replica: int, key: Key) -> int:
    """Returns the number of a channel, from 1 on."""
    return replica * len(_ends(plan)) + _numbers(plan)[key]


@derived
def channels(plan: Plan) -> list[Channel]:
    """Returns all channels in the order of their numbers; the first one has number 1."""
    made = []
    for replica in range(plan.num_replicas):
        for (direction, source, target), ends in _ends(plan).items():
            pairs = [
                (plan.rank_of(replica, direction, *one), plan.rank_of(replica, direction, *other))
                for one, other in ends
            ]
            halos = f"the halos of stage {source}"
            what = halos if source == target else f"messages from stage {source} to stage {target}"
            made.append(Channel(what, tuple(pairs)))
    return made


def carriers(plan: Plan) -> Iterator[Finding]:
    """Yields a warning where a rank has more streams than a GPU has queues."""
    if plan.device != CUDA or plan.backend not in STREAMED:
        return
    used = Counter(rank for one in channels(plan) for rank in one.ranks)
    used.update(rank for group in groups(plan) if len(group) > 1 for rank in group)
    streams = max(used.values(), default=0) + 2  # that which computes, and that of the loader
    if streams > MOST_QUEUES:
        text = (
            f"a rank has up to {streams} streams, and a GPU at most {MOST_QUEUES} queues for them "
            f"({CONNECTIONS}): in a shared one a message that waits could hold up what its other "
            f"side waits for; use fewer stages, or comm.backend=gloo"
        )
        yield Finding("warning", "comm.backend", text)


@derived
def _ends(plan: Plan) -> dict[Key, list[Ends]]:
    """Returns the channels of one replica in order, with the ends of the messages on each."""
    found: dict[Key, dict[Ends, None]] = {}
    for direction in range(plan.num_directions):
        for stage in plan.stages:
            index, own = stage.index, found.setdefault((direction, stage.index, stage.index), {})
            for op in stage.comm if stage.num_ranks > 1 else ():
                for source, target, _ in op.messages:
                    own[(index, source), (index, target)] = None
                    if op.back or op.kind == "crop":
                        own[(index, target), (index, source)] = None
        for edge in plan.edges:
            maker, reader = edge.source, edge.target
            forward, back = ((direction, maker, reader), (direction, reader, maker))
            for source, target, _ in edge.messages:
                found.setdefault(forward, {})[(maker, source), (reader, target)] = None
            for source, target, _ in edge.back:
                found.setdefault(back, {})[(reader, target), (maker, source)] = None
    return {key: list(ends) for key, ends in found.items() if ends}


@derived
def _numbers(plan: Plan) -> dict[Key, int]:
    return {key: number for number, key in enumerate(_ends(plan), start=1)}
