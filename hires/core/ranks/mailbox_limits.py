"""Limits messages through shared memory, for proofs and for ``hires.comm.backends.shared``."""

from __future__ import annotations

SLOTS = 2
"""Messages from one member of a group to another that may lie unread; one more waits."""
MAIL_BYTES = 262144
"""Largest message between two members, unless there are many."""
ALL_MAIL_BYTES = 2**26
"""Memory for the messages of one group."""
GATHER_BYTES = 65536
"""Largest tensor that a rank gives to a gather through memory."""
LINE = 128
"""Bytes between two counters, and a unit of every message: cache lines of its own."""


def mail_bytes(num_ranks: int) -> int:
    """Returns the largest message between two members of a group; larger ones are sent."""
    share = ALL_MAIL_BYTES // (SLOTS * num_ranks * num_ranks)
    return min(MAIL_BYTES, share // LINE * LINE)
