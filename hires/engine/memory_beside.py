"""Predicts what a rank takes beside its tensors: kernels of oneDNN, and the backend ``shm``.

oneDNN writes machine code for each shape of a convolution or product, and for each reordering of a
weight, and keeps it: of ResNet-50 in 32 tiles and int8 3.2 MiB beside 22.4 MiB of weights.

Of the memory of ``shm`` a page counts once it is touched:

    collectives   of each group two sets of slots, one slot a rank; two sets of shares of a sum
    messages      four cells from each rank to each, which messages use in turn
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from hires.comm.backends import rings, rounds
from hires.comm.backends.counters import LINE
from hires.parallel.context import Context
from hires.plan.event import POSTS
from hires.plan.groups import groups
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.routes import DIRECT, MEMORY

PAGE_BYTES = 4096


def backend_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes that a rank touches in a step, rounded up to pages."""
    members = [*groups(plan), [*range(plan.world)]]  # the last one is the world, -1
    joint: dict[int, int] = defaultdict(int)  # largest of each group
    messages: dict[tuple[str, int], int] = defaultdict(int)  # and to or from each rank
    for event in events(plan, rank):
        route = event.route
        if route is None or not event.counts or route.backend not in MEMORY:
            continue
        num_bytes = min(event.num_bytes, route.segment_bytes or event.num_bytes)
        if event.kind in POSTS:
            ways = [(event.kind, event.peer)]
        elif route.algorithm != DIRECT:
            joint[event.peer] = max(joint[event.peer], num_bytes)
            continue
        else:
            ways = [(kind, r) for kind in POSTS for r in members[event.peer] if r != rank]
        for way in ways:
            messages[way] = max(messages[way], num_bytes)
    total = sum(_of_rounds(len(members[group]), size) for group, size in joint.items())
    return total + sum(_of_ring(plan.world, size) for size in messages.values())


def _of_rounds(num_ranks: int, num_bytes: int) -> int:
    # At the most: of a large sum a rank reads its share of the slots of the others.
    slot = _pages(min(num_bytes, rounds.slot_bytes(num_ranks)))
    shares = slot if num_bytes > rounds.WHOLE_BYTES else 0
    return 2 * (num_ranks * slot + shares)


def _of_ring(world: int, num_bytes: int) -> int:
    return rings.CELLS * min(_pages(num_bytes + LINE), _pages(rings.cell_bytes(world)))


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


KERNEL_BYTES = 64 * 2**10
"""Of one 8-bit kernel: on AVX2 a process grew by 40 to 60 KiB in the first call of a convolution,
of a product with a sum as much again, and by 12 to 48 KiB when its weight was packed."""


def kernel_bytes(contexts: Iterable[Context]) -> int:
    """Returns the bytes of the 8-bit kernels of a rank's slots; kernels of one shape are one."""
    kernels: set[Hashable] = set()
    for context in contexts:
        for node in context.plan.nodes(context.stage.index):
            if facts_of(node.kind).kernel_per_shape:
                graph = context.plan.graph
                shapes = [graph.shape(node.inputs[0]), graph.shape(node.name)]
                shapes += [graph.params[name].shape for name in node.params]
                adds = node.args.get("other") is not None
                kernels.add((node.kind, adds, *map(tuple, shapes)))
    return KERNEL_BYTES * len(kernels)
