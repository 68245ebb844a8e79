"""Carries messages of the host's memory with gloo, over TCP, without torch's default group.

It calls the library directly, beside any default group of ``torch.distributed``. Gloo has no
collectives of unequal sizes: these are composed of messages. Operations that do not reduce move
bytes, since some of them lack types.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends import rendezvous
from hires.comm.backends.backend import (
    RESERVED_TAGS,
    SUM,
    TAGS,
    Backend,
    Members,
    finished,
    row_of,
)
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.backends.works import busy_threads, run_in_thread
from hires.core.errors import PeerError

_NUM_TAGS, _SIZES = 2**17, 16381  # the largest prime number: sizes are often powers of two
_USER_TAGS = _NUM_TAGS - (TAGS - RESERVED_TAGS)
_EXIT_S = 2.0
"""Longest wait at exit for threads whose connections were broken."""
_NEVER_SENT = _SIZES * _NUM_TAGS
_LOOPBACK = "127.0.0.1"
_libraries: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass
class GlooGroup(Members):
    """Some ranks, and what connects them."""

    library: Any  # ProcessGroupGloo; None where this rank is not a member
    of_devices: Any = None  # that of tensors on GPUs, beside gloo


class GlooBackend(Backend):
    """The functions of torch.distributed over gloo."""

    name = "gloo"

    def __init__(self) -> None:
        self._numbers = rendezvous.GroupNumbers()

    def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
        """Joins the world; RuntimeError: a rank does not come within ``timeout_s``."""
        world = meeting.world
        rendezvous.choose_interface(world)
        self._store = meeting.part(self.name, timeout_s)
        self.rank, self._join_s = world.rank, timeout_s
        self._is_local = world.local_size == world.size
        self.everyone = self._group([*range(world.size)], timeout_s)

    def members(self, group: GlooGroup | None) -> GlooGroup:
        """Returns a handle, or that of the world."""
        among = self.everyone if group is None else group
        if among is None or among.library is None:
            raise ValueError("this rank is not a member of the group")
        return among

    def new_group(self, ranks: list[int], timeout: datetime.timedelta | None = None) -> GlooGroup:
        """Connects some ranks, which meet in the store without the others."""
        timeout_s = self.limit_s(timeout)
        return self._group(ranks, timeout_s)

    def destroy_group(self, group: GlooGroup) -> None:
        """Closes the group's connections once nothing is under way on them."""
        group.library = None

    def _group(self, ranks: list[int], timeout_s: float) -> GlooGroup:
        if self.rank not in ranks:
            return GlooGroup(ranks, -1, timeout_s, None)
        store = rendezvous.part(self._store, str(self._numbers.next(ranks)))
        index = ranks.index(self.rank)
        # To connect may take no longer than to join, however patient the group is later.
        gloo: Any = dist.ProcessGroupGloo
        limit_s = min(timeout_s, self._join_s)
        # Without the others gloo would wait several times as long.
        rendezvous.meet_members(store, ranks, index, limit_s)
        options: Any = datetime.timedelta(seconds=limit_s)
        if self._is_local:  # no other machine needs to reach these ranks
            patience, options = options, gloo._Options()
            options._timeout = patience
            options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        library = gloo(store, index, len(ranks), options)
        library.barrier().wait()  # a rank that frees it now would break the others' connecting
        library._set_default_timeout(datetime.timedelta(seconds=timeout_s))
        _libraries.add(library)
        return GlooGroup(ranks, index, timeout_s, library)

    def isend(
        self, tensor: Tensor, dst: int, group: GlooGroup | None = None, tag: int = 0
    ) -> GlooWork:
        """Begins to send a tensor."""
        among = self.members(group)
        slot = slot_of(tag, tensor.nbytes)
        return GlooWork(among.library.send([tensor], among.place(dst), slot), among.library)

    def irecv(
        self, tensor: Tensor, src: int, group: GlooGroup | None = None, tag: int = 0
    ) -> GlooWork:
        """Begins to receive a tensor."""
        among = self.members(group)
        slot = slot_of(tag, tensor.nbytes)
        return GlooWork(among.library.recv([tensor], among.place(src), slot), among.library)

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: GlooGroup | None = None, async_op: bool = False
    ) -> Any:
        """Reduces a tensor in place."""
        library = self._library(self.members(group), tensor)
        return finished(library.allreduce(tensor, op), async_op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: Any = SUM,
        group: GlooGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces a tensor into that of a rank."""
        among = self.members(group)
        library = self._library(among, tensor)
        return finished(library.reduce(tensor, among.place(dst), op), async_op)

    def broadcast(
        self, tensor: Tensor, src: int, group: GlooGroup | None = None, async_op: bool = False
    ) -> Any:
        """Fills a tensor with that of a rank."""
        among = self.members(group)
        library = self._library(among, tensor)
        return finished(library.broadcast(as_bytes(tensor), among.place(src)), async_op)

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        tensor: Tensor,
        group: GlooGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fills a tensor for each rank."""
        size = tensor.nbytes
        if any(part.nbytes != size for part in outputs):
            return super().all_gather(outputs, tensor, group, async_op)
        library, row, own = self._library(self.members(group), tensor), None, as_bytes(tensor)
        if not tensor.is_cpu and (row := row_of(outputs)) is not None:
            return finished(library._allgather_base(as_bytes(row), own), async_op)
        return finished(library.allgather([as_bytes(part) for part in outputs], own), async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: Any = SUM,
        group: GlooGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces a tensor for each rank, and leaves on each its own."""
        # By the inputs alone, whose sizes all ranks share.
        if len({part.numel() for part in inputs}) > 1:
            return super().reduce_scatter(output, inputs, op, group, async_op)
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        # As rows of numbers: its own shapes would have to agree.
        flat, row = row_of(inputs), output.view(-1)
        flat = torch.cat([part.view(-1) for part in inputs]) if flat is None else flat
        among = self.members(group)
        library = self._library(among, output)
        work = library._reduce_scatter_base(row, flat, options)
        if library is among.library:  # NCCL's own can be looked at, and orders streams
            work = GlooWork(work, library, flat)
        return finished(work, async_op)

    def barrier(self, group: GlooGroup | None = None, async_op: bool = False) -> Any:
        """Waits for all ranks of a group."""
        return finished(self.members(group).library.barrier(), async_op)

    def _library(self, group: GlooGroup, tensor: Tensor) -> Any:
        return group.library


class GlooWork:
    """A message or reduce-scatter, which gloo can only wait for.

    A wait that is late breaks its connections, so to look at it, or to wait for a shorter time, a
    thread waits for it.
    """

    def __init__(self, work: Any, library: Any, *tensors: Tensor) -> None:
        self._work, self._tensors = work, tensors
        self._library = library  # which exit breaks while it is kept
        self._ended: Future[None] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Returns when it is complete; RuntimeError or CommError: it failed, or is late."""
        if timeout is None and self._ended is None:
            self._work.wait()
            return True
        limit_s = None if timeout is None else timeout.total_seconds()
        try:
            self._watched().result(limit_s)
        except TimeoutError:
            raise PeerError(f"it took over {limit_s:g} s") from None
        return True

    def is_completed(self) -> bool:
        """Whether it is complete."""
        return self._watched().done()

    def _watched(self) -> Future[None]:
        if self._ended is None:
            self._ended = run_in_thread(self._work.wait)
        return self._ended


@atexit.register
def _end_waits() -> None:
    # A thread that comes back from the C++ of a wait after Python has ended, ends the process with
    # SIGABRT. Nothing ends a wait but a failure of its connections, as one that is late.
    if not busy_threads:
        return
    for library in _libraries:
        if library.size() > 1:
            with contextlib.suppress(Exception):
                peer = (library.rank() + 1) % library.size()
                late = library.recv([torch.empty(1)], peer, _NEVER_SENT)
                late.wait(datetime.timedelta(milliseconds=1))
    until = time.monotonic() + _EXIT_S
    for thread in [*busy_threads] if len(_libraries) else ():
        thread.join(max(0.0, until - time.monotonic()))


def slot_of(tag: int, num_bytes: int) -> int:
    """Returns the tag of gloo for a message with this tag and size.

    gloo ends the process that gets more bytes than it expects, before it can say anything, and
    leaves the rest of a tensor that gets fewer. A message under a tag that holds its size waits for
    a receive of that size instead, and ranks whose sizes differ are named when they are late. Sizes
    that differ by a multiple of 16381 bytes look alike.

        |   size mod 16381   |   tag below 130048, or a reserved one   |
    """
    if _USER_TAGS <= tag < RESERVED_TAGS:
        raise ValueError(f"tag {tag} is beyond those of gloo, 0 to {_USER_TAGS - 1}; use another")
    which = tag if tag < _USER_TAGS else _USER_TAGS + tag - RESERVED_TAGS
    return num_bytes % _SIZES * _NUM_TAGS + which


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8)
