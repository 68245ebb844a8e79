"""Gives every message of a plan its route, from facts that all ranks share.

The plan holds the rules of its tuning table that the ranks of the run can follow, so that ranks
look up what was proved and need no table. The first rule that holds a message decides:

    operation   ranks  same node  class   bytes     route
    send            2  yes        bytes   28672     shm:message
    send            2  no         bytes   1605632   gloo:message
    all_reduce      4  yes        float   94208     shm

A size stands for a message, or for what a rank contributes to a collective.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from hires.core.config.launcher_config import node_starts
from hires.plan.event import WORLD, sent_bytes
from hires.plan.groups import groups
from hires.plan.hardware import CUDA, GLOO, NCCL
from hires.plan.plan import Plan, derived
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
