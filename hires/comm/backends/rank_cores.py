"""Finds out whether the ranks of a machine have a core each, so that one may wait without a pause.

Launchers bind ranks in many ways, and a rank sees its own cores alone: one that is bound to one
core shares it with none, as a rule. So the ranks of a machine show each other theirs:

    rank 0 {0}, rank 1 {1}                  a core each
    rank 0 {0, 1}, rank 1 {0, 1}            a core each
    rank 0 {0}, rank 1 {0}, rank 2 {1, 2}   none: of three cores, two ranks share one
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence


def of_ranks(exchange: Callable[[str], list[str]]) -> bool:
    """Whether all ranks of this machine have one; ``exchange`` returns the texts of all of them."""
    return enough([int(text, 16) for text in exchange(f"{_mask():x}")])


def enough(masks: Sequence[int]) -> bool:
    """Whether each rank can have a core of its own, by the bits of those that it may use.

    Exact where the sets of two ranks are apart or one holds the other, as launchers bind them.
    """
    union = 0
    for mask in masks:
        union |= mask
    return all(
        sum(other & ~one == 0 for other in masks) <= one.bit_count() for one in {*masks, union}
    )


def _mask() -> int:
    # Systems without affinity, as macOS, let a process use all cores.
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0))
    return (1 << (os.cpu_count() or 1)) - 1
