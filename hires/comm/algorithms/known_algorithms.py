"""Lists the algorithms that carry out an operation as several of its backend.

    algorithm       order of the additions; all ranks get the same bits
    segmented       that of the backend, for each piece
    two_step        that of the backend's reduce-scatter: each element is summed on one rank
    hierarchical    that of the backend inside each node, then over the nodes; halves are rounded
                    after the node's sum

``direct`` is :class:`hires.comm.backends.composed.Composed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hires.comm.algorithms import staged
from hires.comm.algorithms.algorithm_group import AlgorithmGroup
from hires.comm.backends.backend_protocol import Backend, Work
from hires.core.errors import CommError, ConfigError
from hires.plan.algorithm_steps import communicators, stages
from hires.plan.routes import Route

Algorithm = Callable[..., Any]
"""``(backend, group, route, *arguments of the backend's method, async_op=False)``, without its
``group``; returns a ``Work`` with ``async_op``, else None once it is complete."""

ALGORITHMS: dict[str, Algorithm] = {
    "all_reduce": staged.all_reduce,
    "reduce": staged.reduce,
    "broadcast": staged.broadcast,
    "all_gather": staged.all_gather,
    "all_gather_into_tensor": staged.all_gather_into_tensor,
}
"""Operation -> what carries it out by the algorithm of a route."""


def algorithm_of(
    backend: Backend, group: AlgorithmGroup, route: Route, operation: str
) -> Callable[..., Work | None]:
    """Returns what has the arguments of a backend's method, and carries it out by a route.

    CommError: the algorithm lacks the operation, or its communicators were not made.
    """
    try:
        stages(operation, route.algorithm, group.ranks, group.nodes, group.rank, group.ranks[0])
    except ConfigError as error:
        raise CommError(str(error)) from None
    needed = communicators(route.algorithm, group.ranks, group.nodes)
    if route.algorithm not in group.algorithms and needed:
        raise CommError(
            f"route {route} needs communicators that are made with a group; begin with "
            f"hires.comm.init(algorithms=[{route.algorithm!r}]), or name it in the tuning table"
        )
    function = ALGORITHMS[operation]

    def carry_out(*args: Any, group: Any = None, async_op: bool = False) -> Work | None:
        work: Work | None = function(backend, made, route, *args, async_op=async_op)
        return work

    made = group
    return carry_out
