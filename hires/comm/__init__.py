"""Sends and receives every message between ranks: point to point, sums, gathers, barriers."""

from hires.comm.runtime import (
    Handle,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    barrier,
    broadcast_text,
    irecv,
    isend,
    max_all,
)
from hires.comm.wire import PATIENCE_S, Group, activity, make_groups, rehearsal, shutdown, start

__all__ = [
    "PATIENCE_S",
    "Group",
    "Handle",
    "activity",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "barrier",
    "broadcast_text",
    "irecv",
    "isend",
    "make_groups",
    "max_all",
    "rehearsal",
    "shutdown",
    "start",
]
