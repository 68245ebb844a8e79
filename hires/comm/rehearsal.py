"""Runs one rank without the others: stands for its backends, and counts the memory it touches."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hires.comm.backends.backend import BACKENDS, Backend
from hires.comm.backends.null import NullBackend
from hires.comm.staging import Staged, Staging
from hires.comm.transport import Group, transport


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
    real, silent = dataclasses.replace(transport), NullBackend(rank)
    names = [*backends] or ["null"]
    transport.backends = dict.fromkeys(names, silent)
    transport.channels = transport.streams = None
    transport.stagings = {
        name: Staging(BACKENDS[name].devices)
        if len(BACKENDS[name].devices) > 1 and backends
        else host
        for host in [staging or Staging(Backend.devices)]
        for name in names
    }
    transport.world, transport.table = Group([rank], 0, dict.fromkeys(names)), None
    transport.num_groups = Counter()
    transport.rank = rank
    transport.check = transport.texts = None
    try:
        yield silent
    finally:
        vars(transport).update(vars(real) | {"log": transport.log})
