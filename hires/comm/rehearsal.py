"""Runs one rank without the others: stands for its backends, and counts the memory it touches."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hires.comm.backends import counters
from hires.comm.backends.attach import CHUNK_BYTES
from hires.comm.backends.known_backends import HOST_ONLY, REACHES
from hires.comm.backends.null import NullBackend
from hires.comm.staging import Staged, Staging
from hires.comm.transport import Group, transport


class SilentBackend(NullBackend):
    """The one backend of a rank that is rehearsed; it also counts what goes through memory."""

    def __init__(self, rank: int, shared_memory: bool, reads_peers: bool = True) -> None:
        super().__init__(rank)
        self.memories: list[SilentMemory] = []
        self._shared_memory, self._reads_peers = shared_memory, reads_peers

    def two_step(
        self, num_ranks: int, tensor: Tensor, *_: Any, async_op: bool = False, **__: Any
    ) -> Any:
        """Leaves the tensor as it is; allocates its shares while it is scattered and gathered."""
        even = tensor.view(-1)[: tensor.numel() // num_ranks * num_ranks]
        shares = tensor.new_empty(even.numel() // num_ranks)
        self.reduce_scatter_tensor(shares, even)
        self.all_gather_into_tensor(even, shares)
        return self._end("all_reduce", [tensor], async_op)

    def share_memory(self, num_ranks: int, mail_bytes: int) -> SilentMemory | None:
        """Returns a stand-in for the shared memory of a group, or None where there is none."""
        if num_ranks == 1 or not self._shared_memory or not counters.supported():
            return None
        self.memories.append(SilentMemory(num_ranks, mail_bytes, self._reads_peers))
        return self.memories[-1]

    def shared_bytes(self) -> int:
        """Returns the bytes of shared memory that the rank touched; messages have two places."""
        return sum(2 * size for memory in self.memories for size in memory.largest.values())


class SilentStaging(Staging):
    """Stands for the host's buffers of a rank on a GPU, as tensors of the device ``meta``.

    ``sizes`` are the bytes of all buffers; as in a run, they are kept and used again.
    """

    def __init__(self) -> None:
        super().__init__(("meta",), self._count)
        self.sizes: list[int] = []

    def of(self, tensors: Sequence[Tensor]) -> Staged | None:
        """Returns a buffer for tensors of the GPU."""
        return None if tensors[0].device.type in self.reaches else _SilentStaged(self, tensors)

    def _count(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.sizes.append(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device="meta")


class _SilentStaged(Staged):
    """A buffer to which nothing is copied."""

    def fetch(self) -> Staged:
        return self

    def put(self) -> None:
        self.drop()


class SilentMemory:
    """Stands for the memory of a group, shared or attached (:mod:`hires.comm.backends`).

    A page counts once it is touched, so ``largest`` holds the bytes of the largest message of each
    kind to or from each peer.
    """

    def __init__(self, num_ranks: int, mail_bytes: int, reads_peers: bool) -> None:
        self.mail_bytes, self._reads_peers = mail_bytes, reads_peers
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

    def peers(self) -> SilentMemory | None:
        """Returns itself; None where ranks may not read each other's memory."""
        return self if self._reads_peers else None

    def sum(self, tensors: list[Tensor]) -> None:
        """Leaves the tensors as they are; allocates the piece of each other rank for a moment."""
        tensors[0].new_empty((self._num_ranks - 1) * CHUNK_BYTES, dtype=torch.uint8)

    def reduce_parts(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Leaves the tensors as they are; allocates the piece of each other rank for a moment."""
        self.sum([tensor for own in parts for tensor in own])

    def read_parts(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Leaves the tensors as they are."""

    def _touch(self, kind: str, peer: int, num_bytes: int) -> None:
        self.largest[kind, peer] = max(self.largest.get((kind, peer), 0), num_bytes)


@contextlib.contextmanager
def rehearsal(
    rank: int,
    shared_memory: bool,
    staging: Staging | None = None,
    backends: Sequence[str] = (),
    reads_peers: bool = True,
) -> Iterator[SilentBackend]:
    """Runs this process as one rank without the other ranks, until the block ends.

    Nothing is sent, and receive buffers keep their contents. All else is as in a real run; with
    ``staging`` messages go through that, but for those of ``backends`` that reach any device.
    ``reads_peers``: ranks that share memory may also read each other's.
    """
    real, silent = dataclasses.replace(transport), SilentBackend(rank, shared_memory, reads_peers)
    alone = not any(isinstance(one, SilentBackend) for one in real.backends.values())
    assert alone, "one rehearsal at a time"
    names = [*backends] or ["null"]
    transport.backends = dict.fromkeys(names, silent)
    transport.channels = transport.streams = None
    transport.stagings = {
        name: Staging(REACHES[name]) if name in REACHES and backends else host
        for host in [staging or Staging(HOST_ONLY)]
        for name in (*names, "shm", "cma")  # memory of groups is no backend that ranks join
    }
    transport.world, transport.table = Group([rank], 0, dict.fromkeys(names)), None
    transport.algorithms, transport.num_groups = {}, Counter()
    transport.rank = rank
    transport.check = None
    try:
        yield silent
    finally:
        vars(transport).update(vars(real) | {"log": transport.log})
