"""How do ranks talk? Every message of hires goes through these functions."""

from hires.comm.runtime import (
    PATIENCE_S,
    Group,
    Handle,
    all_gather,
    all_reduce,
    barrier,
    doing,
    irecv,
    isend,
    largest,
    make_groups,
    rehearsal,
    shutdown,
    start,
    sum_together,
    told_by_first,
)

__all__ = [
    "PATIENCE_S",
    "Group",
    "Handle",
    "all_gather",
    "all_reduce",
    "barrier",
    "doing",
    "irecv",
    "isend",
    "largest",
    "make_groups",
    "rehearsal",
    "shutdown",
    "start",
    "sum_together",
    "told_by_first",
]
