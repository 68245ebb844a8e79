"""Replaces the backend for one rank that is rehearsed alone: messages complete at once.

Memory stays alive as with a real one: a message keeps its tensor until its handle is dropped, and
gloo's own scratch memory is allocated while an operation runs. So the memory of a rank is counted
without the other ranks, and under ``FakeTensorMode`` without any memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hires.comm import shared
from hires.comm.attach import CHUNK_BYTES

SEGMENT_BYTES = 2**20
"""Largest piece in which gloo's ring all-reduce passes a tensor on; it keeps two of them."""


class _Done:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # kept alive as long as a real handle would

    def wait(self) -> None: ...


class SilentBackend:
    """The functions of a backend, for one rank without a world."""

    def __init__(self, rank: int, shared_memory: bool) -> None:
        self.rank = rank
        self.on_receive: Callable[[Tensor], None] | None = None
        """Called with every tensor that a receive would fill."""
        self.memories: list[SilentMemory] = []
        self._shared_memory = shared_memory

    def get_rank(self) -> int:
        """Returns the rank that is rehearsed."""
        return self.rank

    def new_group(self, ranks: list[int]) -> None:
        """Makes nothing."""

    def isend(self, tensor: Tensor, peer: int, tag: int) -> _Done:
        """Sends nothing."""
        return _Done(tensor)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> _Done:
        """Leaves the tensor as it is."""
        if self.on_receive is not None:
            self.on_receive(tensor)
        return _Done(tensor)

    def all_reduce(self, tensor: Tensor, group: Any, async_op: bool) -> _Done:
        """Leaves the tensor as it is."""
        torch.empty(2 * min(SEGMENT_BYTES, tensor.nbytes), dtype=torch.uint8)  # counted, and freed
        return _Done(tensor)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, group: Any) -> None:
        """Leaves the parts as they are; gloo gathers them in one piece first."""
        torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)

    def barrier(self) -> None:
        """Returns at once."""

    def share_memory(self, num_ranks: int, mail_bytes: int) -> SilentMemory | None:
        """Returns a stand-in for the shared memory of a group, or None where there is none."""
        if num_ranks == 1 or not self._shared_memory or not shared.supported():
            return None
        self.memories.append(SilentMemory(num_ranks, mail_bytes))
        return self.memories[-1]

    def shared_bytes(self) -> int:
        """Returns the bytes of shared memory that the rank touched; messages have two places."""
        return sum(2 * size for memory in self.memories for size in memory.largest.values())


class SilentMemory:
    """Stands for the :class:`SharedMemory` and :class:`PeerMemory` of a group.

    A page counts once it is touched, so ``largest`` holds the bytes of the largest message of each
    kind to or from each peer.
    """

    def __init__(self, num_ranks: int, mail_bytes: int) -> None:
        self.mail_bytes = mail_bytes
        self.largest: dict[tuple[str, int], int] = {}
        self._num_ranks = num_ranks

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the shape that a gather gives; it reads the places of all ranks."""
        self._touch("gather", 0, self._num_ranks * tensor.nbytes)
        return tensor.new_empty((self._num_ranks, *tensor.shape))

    def send(self, tensor: Tensor, target: int) -> None:
        """Counts the message."""
        self._touch("send", target, tensor.nbytes)

    def expect(self, buffer: Tensor, source: int) -> Callable[[], None]:
        """Counts the message; returns a function that does nothing."""
        self._touch("receive", source, buffer.nbytes)
        return lambda: None

    def peers(self) -> SilentMemory:
        """Returns itself."""
        return self

    def sum(self, tensors: list[Tensor]) -> None:
        """Leaves the tensors as they are; allocates the piece of each other rank for a moment."""
        torch.empty((self._num_ranks - 1) * CHUNK_BYTES, dtype=torch.uint8)

    def _touch(self, kind: str, peer: int, num_bytes: int) -> None:
        self.largest[kind, peer] = max(self.largest.get((kind, peer), 0), num_bytes)
