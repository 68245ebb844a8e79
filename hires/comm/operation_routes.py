"""Chooses the route of an operation: that of its caller, of the tuning table, or the usual one."""

from __future__ import annotations

import torch

from hires.comm import message_log as logs
from hires.comm.backends.backend import BACKENDS
from hires.comm.transport import Group, transport
from hires.core.errors import CommError
from hires.plan.routes import DIRECT, OWN, PLAN_ONLY, Route, is_possible, parse_route
from hires.plan.table_rules import dtype_class
from hires.plan.traffic import CALLED

Choice = str | Route | None
"""A backend, or a whole route, also as text; None: the tuning table chooses."""
DIRECT_BYTES = 2**16
"""Up to this size a gather goes point to point: a third of the latency of gloo's collective."""


def route_of(
    operation: int,
    group: Group,
    choice: Choice,
    dtype: torch.dtype,
    num_bytes: int,
    device: str,
    peer: int = -1,
) -> Route:
    """Returns the route of an operation; CommError: it names a backend that is not in use.

    A pure function of what all ranks of the group share, or both ends of a message.
    """
    name = CALLED[operation]
    if isinstance(choice, Route):
        route = choice
    elif choice is not None:
        route = parse_route(choice) if ":" in choice else Route(choice)
    elif transport.table is not None and group.size > 1:
        kind = dtype_class(name, str(dtype))
        place = (group.size, ranks_per_node(group)) if peer < 0 else _pair(peer)
        table = "send" if name == "recv" else name
        route = transport.table.route(table, *place, device, kind, num_bytes, is_possible)
        if route.algorithm in PLAN_ONLY:
            route = Route(route.backend)
    else:
        small = operation == logs.ALL_GATHER and num_bytes <= DIRECT_BYTES
        direct = small and not BACKENDS[transport.default].gathers_quickly
        route = Route(transport.default, DIRECT if direct else OWN)
    if route.backend not in transport.backends:
        in_use = ", ".join(transport.backends)
        raise CommError(
            f"backend {route.backend!r} was not passed to init(); pass it, or use {in_use}"
        )
    if not is_possible(route):
        raise CommError(
            f"route {route}: its messages are posted one by one, and on streams each would wait "
            f"for the one before; use {route.backend}"
        )
    return route


def _pair(peer: int) -> tuple[int, int]:
    # As in a plan, a message lies between two ranks, of which one or both are on a node.
    nodes = transport.nodes
    return 2, 1 + (nodes[peer] == nodes[transport.rank])


def ranks_per_node(group: Group) -> int:
    """Returns the most ranks of a group that share a machine."""
    nodes = [transport.nodes[rank] for rank in group.ranks]
    return max(map(nodes.count, {*nodes}))
