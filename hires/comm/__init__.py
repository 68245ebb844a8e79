"""How do ranks talk? Every message of hires goes through these functions."""

from hires.comm.rank_groups import Group, make_groups
from hires.comm.runtime import (
    Handle,
    all_gather,
    all_reduce,
    barrier,
    irecv,
    isend,
    largest,
    sum_together,
    told_by_first,
)
from hires.comm.wire import PATIENCE_S, doing, rehearsal, shutdown, start

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
