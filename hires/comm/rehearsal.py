"""Runs one rank without the others: stands for its backends, and counts the memory it touches."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hires.comm.backends.backend import BACKENDS, Backend
from hires.comm.backends.null import NullBackend
from hires.comm.staging import Staged, Staging
from hires.comm.transport import Group, transport
from hires.core.ranks import memory_files


class SilentBackend(NullBackend):
    """The one backend of a rank that is rehearsed; it also counts what goes through memory."""

    def __init__(self, rank: int, shared_memory: bool) -> None:
        super().__init__(rank)
        self.memories: list[SilentMemory] = []
        self._shared_memory = shared_memory

    def share_memory(self, num_ranks: int, mail_bytes: int) -> SilentMemory | None:
        """Returns a stand-in for the shared memory of a group, or None where there is none."""
        if num_ranks == 1 or not self._shared_memory or not memory_files.is_supported():
            return None
        self.memories.append(SilentMemory(num_ranks, mail_bytes))
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
    """Stands for the memory of a group (:mod:`hires.comm.backends.shared`).

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

    def _touch(self, kind: str, peer: int, num_bytes: int) -> None:
        self.largest[kind, peer] = max(self.largest.get((kind, peer), 0), num_bytes)


@contextlib.contextmanager
def rehearsal(
    rank: int,
    shared_memory: bool,
    staging: Staging | None = None,
    backends: Sequence[str] = (),
) -> Iterator[SilentBackend]:
    """Runs this process as one rank without the other ranks, until the block ends.

    Nothing is sent, and receive buffers keep their contents. All else is as in a real run; with
    ``staging`` messages go through that, but for those of ``backends`` that reach any device.
    """
    real, silent = dataclasses.replace(transport), SilentBackend(rank, shared_memory)
    alone = not any(isinstance(one, SilentBackend) for one in real.backends.values())
    assert alone, "one rehearsal at a time"
    names = [*backends] or ["null"]
    transport.backends = dict.fromkeys(names, silent)
    transport.channels = transport.streams = None
    transport.stagings = {
        name: Staging(BACKENDS[name].devices)
        if len(BACKENDS[name].devices) > 1 and backends
        else host
        for host in [staging or Staging(Backend.devices)]
        for name in (*names, "shm")  # memory of groups is no backend that ranks join
    }
    transport.world, transport.table = Group([rank], 0, dict.fromkeys(names)), None
    transport.num_groups = Counter()
    transport.rank = rank
    transport.check = None
    try:
        yield silent
    finally:
        vars(transport).update(vars(real) | {"log": transport.log})
