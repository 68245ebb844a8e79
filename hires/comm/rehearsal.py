"""Replaces the transport for one rank that is rehearsed alone: messages complete at once.

It takes the place of ``torch.distributed`` and keeps memory alive as that does: a message keeps its
tensor until its handle is dropped, and gloo's own scratch memory is allocated while an operation
runs. So the memory of a rank is counted without the other ranks, and under ``FakeTensorMode``
without any memory.
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


class Silence:
    """An operation that is complete at once."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self._tensor = tensor  # kept alive as long as the transport's own handle would

    def wait(self) -> None:
        """Returns at once."""


class SilentWire:
    """The functions of ``torch.distributed`` that hires uses, for one rank without a world."""

    def __init__(self, rank: int, shared_memory: bool) -> None:
        self.rank = rank
        self.on_receive: Callable[[Tensor], None] | None = None
        """Called with every tensor that a receive would fill."""
        self.memories: list[SilentMemory] = []
        self._shared_memory = shared_memory

    def get_rank(self) -> int:
        """Returns the rank that is rehearsed."""
        return self.rank

    def new_group(self, ranks: list[int]) -> Silence:
        """Returns a stand-in for a process group."""
        return Silence()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Silence:
        """Sends nothing."""
        return Silence(tensor)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Silence:
        """Leaves the tensor as it is."""
        if self.on_receive is not None:
            self.on_receive(tensor)
        return Silence(tensor)

    def all_reduce(self, tensor: Tensor, group: Any, async_op: bool) -> Silence:
        """Leaves the tensor as it is."""
        torch.empty(2 * min(SEGMENT_BYTES, tensor.nbytes), dtype=torch.uint8)  # counted, and freed
        return Silence(tensor)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, group: Any) -> None:
        """Leaves the parts as they are; gloo gathers them in one piece first."""
        torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)

    def barrier(self) -> None:
        """Returns at once."""

    def share_memory(self, num_ranks: int, mail: bool) -> SilentMemory | None:
        """Returns a stand-in for the shared memory of a group, or None where there is none."""
        if num_ranks == 1 or not self._shared_memory or not shared.supported():
            return None
        self.memories.append(SilentMemory(num_ranks, mail))
        return self.memories[-1]

    def shared_bytes(self) -> int:
        """Returns the bytes of all shared memory that the rank has touched so far."""
        return sum(memory.touched_bytes() for memory in self.memories)


class SilentMemory:
    """Stands for the :class:`SharedMemory` and :class:`PeerMemory` of a group.

    A page of shared memory counts once it is touched, so the largest message of each kind to or
    from each peer is what counts.
    """

    def __init__(self, num_ranks: int, mail: bool) -> None:
        self.mail_bytes = shared.mail_bytes(num_ranks, mail)
        self._num_ranks = num_ranks
        self._largest: dict[tuple[str, int], int] = {}

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the shape that a gather gives."""
        self._count("gather", 0, tensor)
        return tensor.new_empty((self._num_ranks, *tensor.shape))

    def send(self, tensor: Tensor, target: int) -> None:
        """Counts the message."""
        self._count("send", target, tensor)

    def expect(self, buffer: Tensor, source: int) -> Callable[[], None]:
        """Counts the message; returns a function that does nothing."""
        self._count("receive", source, buffer)
        return lambda: None

    def touched_bytes(self) -> int:
        """Returns the bytes that the rank has read or written; every message has two places."""
        # A gather reads the places of all ranks.
        shares = {"gather": self._num_ranks, "send": 1, "receive": 1}
        return sum(2 * shares[kind] * size for (kind, _), size in self._largest.items())

    def sum(self, tensors: list[Tensor]) -> None:
        """Leaves the tensors as they are; allocates the piece of each other rank for a moment."""
        torch.empty((self._num_ranks - 1) * CHUNK_BYTES, dtype=torch.uint8)

    def _count(self, kind: str, peer: int, tensor: Tensor) -> None:
        self._largest[kind, peer] = max(self._largest.get((kind, peer), 0), tensor.nbytes)
