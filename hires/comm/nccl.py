"""Carries tensors of GPUs with NCCL, and those of the host, as agreements, with gloo.

It has the functions of ``torch.distributed``, which chooses by where a tensor is: every group has
both backends. It was never run on a GPU: tests replace NCCL by a stand-in with its semantics.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from hires.core.errors import CommError

BOTH = "cpu:gloo,cuda:nccl"
"""Backends of a group by the kind of a tensor's device, as torch names them."""


class NcclBackend:
    """torch.distributed with groups that have both backends."""

    has_streams = True

    def __init__(self, library: Any = dist) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        """Returns what torch.distributed has under a name."""
        return getattr(self._library, name)

    def join(self, place: str, timeout_s: float, size: int, rank: int) -> None:
        """Joins the world; CommError: this torch or this machine has no NCCL."""
        if not self._library.is_nccl_available():
            raise CommError("this torch has no NCCL; use comm.backend=gloo, or a torch with CUDA")
        self._patience = datetime.timedelta(seconds=timeout_s)
        self._library.init_process_group(BOTH, place, self._patience, size, rank)

    def new_group(self, ranks: Any = None, timeout: datetime.timedelta | None = None) -> Any:
        """Makes a group for sums and gathers; all ranks of the world call it in one order."""
        return self._library.new_group(ranks, timeout or self._patience, BOTH)

    def new_channel(self, ranks: list[int]) -> Any:
        """Makes a group for messages alone, which has a communicator and a stream of its own."""
        return self._library.new_group(ranks, self._patience, "nccl")

    def barrier(self, group: Any = None) -> None:
        """Brings the ranks together through the host: NCCL's own barrier would need a GPU."""
        self._library.all_reduce(torch.zeros(1), group=group)
