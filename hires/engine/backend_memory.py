"""Predicts the shared memory that a rank touches of the backends ``shm`` and ``cma``.

That of a plan's own groups (mailboxes, slots of gathers) is counted by the rehearsal, as messages
go through it. Whole backends have more, of which a page counts once it is touched:

    collectives   of each group two sets of slots, one slot a rank; two sets of shares of a sum
    messages      eight cells from each rank to each, which messages use in turn

``cma`` passes addresses and short messages through them, and nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict

from hires.comm.backends import rings, rounds
from hires.core.ranks.mailbox_limits import LINE
from hires.plan.event import BYTES, JOINT, POSTS
from hires.plan.groups import groups
from hires.plan.message_routes import IN_GROUPS
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.routes import DIRECT, MEMORY

PAGE_BYTES = 4096


def backend_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes that a rank touches in a step, rounded up to pages."""
    members = [*groups(plan), [*range(plan.world)]]  # the last one is the world, -1
    joint: dict[tuple[str, int], int] = defaultdict(int)  # largest of each group
    messages: dict[tuple[str, str, int], int] = defaultdict(int)  # and of each way
    for event in events(plan, rank):
        route = event.route
        if route is None or event.kind not in (*POSTS, *JOINT):
            continue
        if route.backend not in MEMORY or route.algorithm in IN_GROUPS:
            continue
        num_bytes = math.prod(event.shape) * BYTES[event.dtype]
        num_bytes = min(num_bytes, route.segment_bytes or num_bytes)
        if event.kind in POSTS:
            ways = [(event.kind, event.peer)]
        elif route.algorithm != DIRECT:
            key = route.backend, event.peer
            joint[key] = max(joint[key], num_bytes)
            continue
        else:
            ways = [(kind, r) for kind in POSTS for r in members[event.peer] if r != rank]
        for kind, peer in ways:
            way = route.backend, kind, peer
            messages[way] = max(messages[way], num_bytes)
    total = sum(_of_rounds(key[0], len(members[key[1]]), size) for key, size in joint.items())
    return total + sum(_of_ring(key[0], plan.world, size) for key, size in messages.items())


def _of_rounds(backend: str, num_ranks: int, num_bytes: int) -> int:
    # At the most: of a large sum a rank reads its share of the slots of the others.
    most = rounds.slot_bytes(num_ranks) if backend == "shm" else rounds.WHOLE_BYTES
    slot = _pages(min(num_bytes, most))
    shares = slot if backend == "shm" and num_bytes > rounds.WHOLE_BYTES else 0
    return 2 * (num_ranks * slot + shares)


def _of_ring(backend: str, world: int, num_bytes: int) -> int:
    cell = rings.cell_bytes(world)
    if backend == "cma" and num_bytes > cell - LINE:  # its address alone
        num_bytes = 0
    return rings.CELLS * min(_pages(num_bytes + LINE), _pages(cell))


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
