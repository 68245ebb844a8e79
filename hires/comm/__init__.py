"""Sends and receives every message between ranks: point to point, sums, gathers, barriers."""

from hires.comm.membership import (
    PATIENCE_S,
    Group,
    activity,
    broadcast_text,
    make_groups,
    open_channels,
    rehearsal,
    shutdown,
    start,
)
from hires.comm.runtime import (
    Handle,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    barrier,
    end_call,
    irecv,
    isend,
    max_all,
)
