"""Runs one rank without the others: stands for its backends, and counts the memory it touches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hires.comm.backends.backend import Backend
from hires.comm.backends.null import NullBackend
from hires.comm.comm_world import CommWorld, set_default
from hires.comm.staging import Staged, Staging
from hires.core.message_backends import BACKEND_FACTS


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
