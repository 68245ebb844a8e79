"""Describes the algorithms that carry out one operation as several: their stages, as plain data.

A stage is an operation of the backend on one communicator. Large tensors pass the stages in pieces:
piece 1 is in the second stage while piece 2 is in the first. The order in which a rank issues
(:func:`order`) is the same on all ranks of a communicator, because it follows from the number of
pieces alone:

    two_step        scatter   a  b  c               a, b, c: pieces, all begun at once
                    gather          a  b  c         each one begins when its first stage is over

    hierarchical    inside    a  b  c               ranks of one node: a sum at its first rank
                    leaders         a  b  c         the first ranks of all nodes
                    back               a  b  c      from the first rank to its node

A later stage begins when an earlier one is over, at a time that differs between ranks. So every
stage has a communicator of its own, and operations on the same stages follow each other
(:mod:`hires.comm.algorithms`).

Source:
    Thakur et al., "Optimization of collective communication operations in MPICH", IJHPCA 2005
    (reduce-scatter and all-gather); Karonis et al., "Exploiting hierarchy in parallel computer
    networks to optimize collective operation performance", IPDPS 2000.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hires.core.errors import ConfigError

STAGED = {
    "segmented": ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
    "two_step": ("all_reduce",),
    "hierarchical": ("all_reduce", "broadcast"),
    "direct": (
        "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather",
        "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "scatter",
    ),
}  # fmt: skip
"""Algorithm -> operations that it can carry out."""


class Communicator(NamedTuple):
    """Some ranks that carry out one stage; ``""`` is the communicator of the group itself."""

    name: str
    ranks: tuple[int, ...]


class AlgorithmStage(NamedTuple):
    """One operation of a backend; ``root``: its rank of the world, where it has one."""

    operation: str
    communicator: Communicator
    root: int = -1


def communicators(
    algorithm: str, ranks: Sequence[int], nodes: Sequence[int]
) -> tuple[Communicator, ...]:
    """Returns what an algorithm needs beside the communicator of a group of ranks.

    All ranks of the world create them in this order. ``nodes``: the node of each rank of the world.
    """
    every = tuple(ranks)
    if algorithm == "two_step" and len(every) > 1:
        return Communicator("scatter", every), Communicator("gather", every)
    if algorithm != "hierarchical":
        return ()
    apart = _by_node(every, tuple(nodes))
    shared = [members for members in apart if len(members) > 1]
    inside = [Communicator("inside", members) for members in shared]
    leaders = [Communicator("leaders", tuple(members[0] for members in apart))]
    back = [Communicator("back", members) for members in shared]
    return (*inside, *(leaders if len(apart) > 1 else ()), *(back if len(apart) > 1 else ()))


@functools.lru_cache(maxsize=4096)
def stages(
    operation: str,
    algorithm: str,
    ranks: tuple[int, ...],
    nodes: tuple[int, ...],
    rank: int,
    root: int = -1,
) -> tuple[AlgorithmStage, ...]:
    """Returns the stages of an operation of which a rank is part, in their order.

    ConfigError: the algorithm does not carry out the operation. ``direct`` has no stages: its
    messages are sends and receives between all ranks.
    """
    if operation not in STAGED.get(algorithm, ()):
        able = ", ".join(name for name, operations in STAGED.items() if operation in operations)
        raise ConfigError(
            f"{algorithm} cannot carry out {operation}; choose one of "
            f"{', '.join(filter(None, ['collective', able]))}"
        )
    if algorithm == "segmented":
        return (AlgorithmStage(operation, Communicator("", ranks), root),)
    if algorithm == "two_step":
        scatter, gather = communicators(algorithm, ranks, nodes) or [Communicator("", ranks)] * 2
        return AlgorithmStage("reduce_scatter_tensor", scatter), AlgorithmStage(
            "all_gather_into_tensor", gather
        )
    return (*_by_hierarchy(operation, ranks, nodes, rank, root),) if algorithm != "direct" else ()


def order(num_stages: int, num_pieces: int) -> Iterator[tuple[int, int]]:
    """Yields (stage, piece) as a rank issues them; before each it waits for the piece's last stage.

    >>> list(order(2, 3))
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    """
    yield from ((0, piece) for piece in range(num_pieces if num_stages else 0))
    # Along diagonals: the last stage of a piece comes before an earlier stage of a later piece.
    for diagonal in range(1, num_stages + num_pieces - 1):
        for stage in range(min(num_stages - 1, diagonal), 0, -1):
            if 0 <= diagonal - stage < num_pieces:
                yield stage, diagonal - stage


def pieces(num_elements: int, element_bytes: int, segment_bytes: int) -> list[tuple[int, int]]:
    """Returns where each piece of a tensor begins and ends; at least one, of any size.

    >>> pieces(10, 4, 16)
    [(0, 4), (4, 8), (8, 10)]
    """
    each = max(1, segment_bytes // element_bytes) if segment_bytes else max(1, num_elements)
    begins = range(0, max(1, num_elements), each)
    return [(begin, min(num_elements, begin + each)) for begin in begins]


def _by_hierarchy(
    operation: str, ranks: tuple[int, ...], nodes: tuple[int, ...], rank: int, root: int
) -> Iterator[AlgorithmStage]:
    apart = _by_node(ranks, nodes)
    own = next(members for members in apart if rank in members)
    # A broadcast reaches the first rank of its node, those of the others, and their nodes.
    first = next((members[0] for members in apart if root in members), -1)
    inside, back = Communicator("inside", own), Communicator("back", own)
    leaders = Communicator("leaders", tuple(members[0] for members in apart))
    sums, alone = operation == "all_reduce", len(own) == 1
    if len(apart) == 1:
        yield from () if alone else [AlgorithmStage(operation, inside, root)]
        return
    if not alone and (sums or root in own):
        yield AlgorithmStage("reduce" if sums else "broadcast", inside, own[0] if sums else root)
    if rank == own[0]:
        yield AlgorithmStage(operation, leaders, first)
    if not alone and (sums or root not in own):
        yield AlgorithmStage("broadcast", back, own[0])


@functools.lru_cache(maxsize=1024)
def _by_node(ranks: tuple[int, ...], nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    numbers = dict.fromkeys(nodes[rank] for rank in ranks)
    return tuple(tuple(rank for rank in ranks if nodes[rank] == node) for node in numbers)
