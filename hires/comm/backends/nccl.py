"""Carries tensors of GPUs with NCCL, and those of the host, as agreements, with gloo.

It has the functions of ``torch.distributed``, which chooses by where a tensor is: every group has
both backends. It was never run on a GPU: tests replace NCCL by a stand-in with its semantics.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends.backend_protocol import SUM
from hires.core.errors import CommError

_ABORT_S = 10.0
"""How long NCCL may take to end what is under way."""
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

    def join(self, store: Any, timeout_s: float, size: int, rank: int) -> None:
        """Joins the world; CommError: this torch or this machine has no NCCL."""
        if not self._library.is_nccl_available():
            raise CommError("this torch has no NCCL; use comm.backend=gloo, or a torch with CUDA")
        self._patience = datetime.timedelta(seconds=timeout_s)
        self._library.init_process_group(BOTH, None, self._patience, size, rank, store)
        self._double_nccl(self._library.group.WORLD)

    def new_group(
        self,
        ranks: Any = None,
        timeout: datetime.timedelta | None = None,
        members_only: bool = False,
    ) -> Any:
        """Makes a group for sums and gathers; all ranks of the world call it in one order."""
        local = {"use_local_synchronization": True} if members_only else {}
        group = self._library.new_group(ranks, timeout or self._patience, BOTH, **local)
        if timeout is None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._double_nccl(group)
        return group

    def destroy_group(self, group: Any) -> None:
        """Ends the communicators of a group."""
        self._library.destroy_process_group(group)

    def new_channel(self, ranks: list[int]) -> Any:
        """Makes a group for messages alone, which has a communicator and a stream of its own."""
        return self._library.new_group(ranks, 2 * self._patience, "nccl")

    def _double_nccl(self, group: Any) -> None:
        # stream_waits names the operation that is late. NCCL's own watchdog ends the process and
        # names none. It counts from the post, so it gets twice the time.
        group._get_backend(torch.device("cuda"))._set_default_timeout(2 * self._patience)

    def abort(self) -> None:
        """Ends what is under way on all communicators, whose kernels would run for ever."""
        # In a thread, since ncclCommAbort may wait for a network that is gone.
        end = self._library.distributed_c10d._abort_process_group
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_ABORT_S)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Fills a tensor with those of all ranks."""
        function = self._renamed("all_gather_single", "all_gather_into_tensor")
        return function(output_tensor.view(-1), input_tensor.view(-1), group, async_op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces a tensor, and leaves on each rank its part."""
        function = self._renamed("reduce_scatter_single", "reduce_scatter_tensor")
        return function(output.view(-1), input.view(-1), op, group, async_op)

    def _renamed(self, name: str, older: str) -> Any:
        return getattr(self._library, name, None) or getattr(self._library, older)

    def barrier(self, group: Any = None, async_op: bool = False) -> Any:
        """Brings the ranks together through the host: NCCL's own barrier would need a GPU."""
        return self._library.all_reduce(torch.zeros(1), group=group, async_op=async_op)
