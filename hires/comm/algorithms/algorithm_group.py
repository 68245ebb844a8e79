"""Holds what the algorithms of a group need: the communicators of their stages, and a queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hires.comm.backends.fifo import Fifo
from hires.plan.algorithm_steps import Communicator, communicators

Create = Callable[[list[int]], Any]
"""Makes the handle of some ranks; all ranks of the world, or all members, call it in one order."""


@dataclass
class AlgorithmGroup:
    """The communicators of one backend for the algorithms of a group of ranks."""

    ranks: tuple[int, ...]
    rank: int
    nodes: tuple[int, ...]
    """The node of each rank of the world."""
    handles: dict[Communicator, Any]
    algorithms: frozenset[str] = frozenset()
    """Those whose stages have communicators here."""
    queue: Fifo = field(default_factory=lambda: Fifo("comm-algorithm"))


def open_algorithms(
    create: Create,
    handle: Any,
    ranks: Sequence[int],
    rank: int,
    algorithms: Iterable[str],
    nodes: Sequence[int],
) -> AlgorithmGroup:
    """Creates what algorithms need beside a group's ``handle``; called once a group.

    A rank outside of the group gets one that it must not use. ``nodes``: the node of each rank of
    the world.
    """
    names = frozenset(algorithms)
    group = AlgorithmGroup(tuple(ranks), rank, tuple(nodes), {}, names)
    group.handles[Communicator("", group.ranks)] = handle
    for algorithm in sorted(names):
        for communicator in communicators(algorithm, ranks, nodes):
            group.handles[communicator] = create([*communicator.ranks])
    return group
