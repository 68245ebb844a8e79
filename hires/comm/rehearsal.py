"""Runs one rank without the others: stands for its backends, and counts the memory it touches.

Operations complete at once and leave their tensors as they are. Memory stays alive as with a real
backend: a message keeps its tensor until its handle is dropped, and gloo's own scratch memory is
allocated while an operation runs. So the memory of a rank is counted without the other ranks, and
under ``FakeTensorMode`` without any memory.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hires.comm.backends import rings, rounds
from hires.comm.backends.backend import SUM, Backend, Inputs, Members
from hires.comm.backends.counters import LINE
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.comm_world import CommWorld, set_default
from hires.comm.staging import Staged, Staging
from hires.core.message_backends import BACKEND_FACTS
from hires.plan.event import POSTS
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.routes import DIRECT, MEMORY

PAGE_BYTES = 4096
SEGMENT_BYTES = 2**20
"""Largest piece in which gloo's ring all-reduce passes a tensor on; it keeps two of them."""


class NullWork:
    """An operation that is complete; it keeps its tensors alive as long as a real one would."""

    def __init__(self, tensors: Sequence[Tensor], on_wait: Callable[[], None]) -> None:
        self._tensors, self._on_wait = tensors, on_wait

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Returns at once."""
        self._on_wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is complete: yes."""
        return True


class NullBackend(Backend):
    """A backend whose messages go nowhere."""

    devices: tuple[str, ...] = ("cpu", "cuda", "meta")
    is_alone = True

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.on_receive: Callable[[Tensor], None] | None = None
        """Called with every tensor that a receive would fill."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called wherever the rank would wait for others."""

    def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
        """Needs no other rank."""
        self.rank = meeting.world.rank

    def new_group(self, ranks: list[int], timeout: datetime.timedelta | None = None) -> Members:
        """Makes nothing."""
        return Members(ranks, ranks.index(self.rank) if self.rank in ranks else -1, 0.0)

    def members(self, group: Any) -> Members:
        """Returns a handle, or this rank."""
        return group or self.new_group([self.rank])

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """Sends nothing."""
        return NullWork([tensor], self.on_wait)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        """Leaves the tensor as it is."""
        if self.on_receive is not None:
            self.on_receive(tensor)
        return NullWork([tensor], self.on_wait)

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Leaves the tensor as it is."""
        # Counted, and freed; beside a GPU it lies on the host, as the buffer of the message does.
        scratch = 2 * min(SEGMENT_BYTES, tensor.nbytes)
        return self._end([tensor], async_op, scratch)

    def all_gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Leaves the outputs as they are; gloo gathers them in one piece first."""
        scratch = sum(part.nbytes for part in outputs)
        return self._end([tensor, *outputs], async_op, scratch)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Leaves the output as it is; gloo sums a copy of the inputs."""
        scratch = sum(part.nbytes for part in inputs)
        return self._end([*inputs, output], async_op, scratch)

    def exchange(
        self,
        outputs: Inputs,
        inputs: Inputs,
        group: Any = None,
        async_op: bool = False,
        then: Callable[[], Any] | None = None,
    ) -> Any:
        """Leaves the outputs as they are; so do broadcasts and reductions at one rank."""
        tensors = [one for one in (*inputs, *outputs) if one is not None]
        return self._end(tensors, async_op)

    def barrier(self, group: Any = None, async_op: bool = False) -> Any:
        """Returns at once."""
        return self._end((), async_op)

    def _end(
        self, tensors: Sequence[Tensor], async_op: bool, scratch_bytes: int = 0
    ) -> NullWork | None:
        if scratch_bytes:
            tensors[0].new_empty(scratch_bytes, dtype=torch.uint8)
        if async_op:
            return NullWork(tensors, self.on_wait)
        self.on_wait()
        return None


class NullStaging(Staging):
    """Stands for the host's buffers of a rank on a GPU, as tensors of the device ``meta``.

    ``sizes`` are the bytes of all buffers; as in a run, they are kept and used again.
    """

    def __init__(self) -> None:
        super().__init__(("meta",), self._count)
        self.sizes: list[int] = []

    def of(self, tensors: Sequence[Tensor]) -> Staged | None:
        """Returns a buffer for tensors of the GPU."""
        return None if tensors[0].device.type in self.reaches else _NullStaged(self, tensors)

    def _count(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.sizes.append(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device="meta")


class _NullStaged(Staged):
    """A buffer to which nothing is copied."""

    def fetch(self) -> Staged:
        return self

    def put(self) -> None:
        self.drop()


@contextlib.contextmanager
def rehearsal(
    rank: int,
    staging: Staging | None = None,
    backends: Sequence[str] = (),
) -> Iterator[NullBackend]:
    """Runs this process as one rank without the other ranks, until the block ends.

    Nothing is sent, and receive buffers keep their contents. All else is as in a real run; with
    ``staging`` messages go through that, but for those of ``backends`` that reach any device.
    """
    null, names = NullBackend(rank), [*backends] or ["gloo"]
    host = staging or Staging(Backend.devices)
    stagings = {
        name: Staging(reaches) if len(reaches) > 1 and backends else host
        for name in names
        for reaches in [BACKEND_FACTS[name].backend.devices]
    }
    alone = CommWorld(dict.fromkeys(names, null), rank, stagings=stagings)
    before = set_default(alone)
    try:
        yield null
    finally:
        set_default(before)


def backend_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of ``shm`` that a rank touches in a step, rounded up to pages.

    Of each group there are two sets of slots, one slot a rank, and two sets of shares of a sum; for
    messages there are cells from each rank to each, which they use in turn.
    """
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
    total = 0
    for group, num_bytes in joint.items():
        # At the most: of a large sum a rank reads its share of the slots of the others.
        size = len(members[group])
        slot = _pages(min(num_bytes, rounds.slot_bytes(size)))
        total += 2 * (size * slot + (slot if num_bytes > rounds.WHOLE_BYTES else 0))
    cell = _pages(rings.cell_bytes(plan.world))
    return total + sum(rings.CELLS * min(_pages(n + LINE), cell) for n in messages.values())


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
