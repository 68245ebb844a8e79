"""Numbers the communicators of a backend with streams, and lists the ranks of each.

On a stream a message that its other side does not take holds up those behind it
(:mod:`hires.plan.proof.step_order`), so messages that must pass each other have communicators of
their own: in each direction of a replica one for the halos of a stage, and one for each two stages
and each way between them.

    stage 0 (2 tiles)            stage 1 (2 tiles)             channels of one direction
    rank 0 == F0, F1 =========>  rank 2                        1  halos of stage 0: ranks 0 and 1
       ||    <======== B0, B1 ==   ||                          2  halos of stage 1: ranks 2 and 3
    rank 1 ===================>  rank 3                        3  stage 0 to 1: ranks 0 to 3
                                                               4  stage 1 to 0: ranks 0 to 3

What a rank posts in one call on one channel is one group call, so the tiles of a halo exchange need
no order among each other. Sums and gathers have communicators of their own, those of their groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from hires.plan.groups import groups
from hires.plan.hardware import CUDA, NCCL
from hires.plan.plan import Finding, Plan, derived
from hires.plan.routes import STREAMED

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable that limits the queues between a process and its GPU, which its streams share."""
MOST_QUEUES = 32
"""Most that CUDA allows."""

Key = tuple[int, int, int]
"""(direction, source stage, target stage) of the messages; both stages are equal for halos."""


Ends = tuple[tuple[int, int], tuple[int, int]]
"""Of a message: (stage, tile) of its source and of its target."""


class Channel(NamedTuple):
    """A communicator and what it carries."""

    what: str
    """In words."""
    pairs: tuple[tuple[int, int], ...]
    """(source, target) of its messages, as ranks."""

    @property
    def ranks(self) -> list[int]:
        """Those that send or receive on it, in ascending order."""
        return sorted({rank for pair in self.pairs for rank in pair})


def channel_of(plan: Plan, replica: int, key: Key) -> int:
    """Returns the number of a channel, from 1 on."""
    return replica * len(_ends(plan)) + _numbers(plan)[key]


@derived
def channels(plan: Plan) -> list[Channel]:
    """Returns all channels in the order of their numbers; the first one has number 1."""
    made = []
    for replica in range(plan.num_replicas):
        for (direction, source, target), ends in _ends(plan).items():
            pairs = [
                (plan.rank_of(replica, direction, *one), plan.rank_of(replica, direction, *other))
                for one, other in ends
            ]
            halos = f"the halos of stage {source}"
            what = halos if source == target else f"messages from stage {source} to stage {target}"
            made.append(Channel(what, tuple(pairs)))
    return made


def carriers(plan: Plan) -> Iterator[Finding]:
    """Yields what carries the messages of GPUs."""
    if plan.device != CUDA or plan.world == 1:
        return
    if plan.backend in STREAMED:
        used = Counter(rank for one in channels(plan) for rank in one.ranks)
        most = max(used.values(), default=0)
        ways = f"up to {most} communicators" if most > 1 else "one communicator"
        text = (
            f"{f'messages (on {ways} a rank) and sums' if most else 'sums'} go from GPU to GPU "
            f"through {plan.backend}; the agreement before each step goes through "
            f"{'gloo' if plan.backend == NCCL else 'the GPU, too'}"
        )
        used.update(rank for group in groups(plan) if len(group) > 1 for rank in group)
        streams = max(used.values(), default=0) + 2  # that which computes, and that of the loader
        if streams > MOST_QUEUES:
            shared = (
                f"a rank has up to {streams} streams, and a GPU at most {MOST_QUEUES} queues for "
                f"them ({CONNECTIONS}): in a shared one a message that waits could hold up what "
                f"its other side waits for; use fewer stages, or comm.backend=gloo"
            )
            yield Finding("warning", "comm.backend", shared)
    else:
        text = "messages and sums go through gloo, by way of the host's memory"
    yield Finding("note", "comm.backend", text)


@derived
def _ends(plan: Plan) -> dict[Key, list[Ends]]:
    """Returns the channels of one replica in order, with the ends of the messages on each."""
    found: dict[Key, dict[Ends, None]] = {}
    for direction in range(plan.num_directions):
        for stage in plan.stages:
            index, own = stage.index, found.setdefault((direction, stage.index, stage.index), {})
            for op in stage.comm if stage.num_ranks > 1 else ():
                for source, target, _ in op.messages:
                    own[(index, source), (index, target)] = None
                    if op.back or op.kind == "crop":
                        own[(index, target), (index, source)] = None
        for edge in plan.edges:
            maker, reader = edge.source, edge.target
            forward, back = ((direction, maker, reader), (direction, reader, maker))
            for source, target, _ in edge.messages:
                found.setdefault(forward, {})[(maker, source), (reader, target)] = None
            for source, target, _ in edge.back:
                found.setdefault(back, {})[(reader, target), (maker, source)] = None
    return {key: list(ends) for key, ends in found.items() if ends}


@derived
def _numbers(plan: Plan) -> dict[Key, int]:
    return {key: number for number, key in enumerate(_ends(plan), start=1)}
