"""Carries tensors of GPUs with NCCL, and those of the host, as agreements, with gloo.

It has the functions of ``torch.distributed``, which chooses by where a tensor is: every group has
both backends. It was never run on a GPU: tests replace NCCL by a stand-in with its semantics.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends import rendezvous
from hires.comm.backends.backend import (
    BACKENDS,
    SUM,
    Backend,
    Inputs,
    Members,
    finished,
    row_of,
)
from hires.comm.backends.fifo import JoinedWork
from hires.core.errors import CommError
from hires.core.ranks.world import World

_ABORT_S = 10.0
"""How long NCCL may take to end what is under way."""
BOTH = "cpu:gloo,cuda:nccl"
"""Backends of a group by the kind of a tensor's device, as torch names them."""


@BACKENDS.register("nccl")
class NcclBackend(Backend):
    """torch.distributed with groups that have both backends."""

    has_streams = gathers_quickly = True
    devices = ("cpu", "cuda")

    def __init__(self, library: Any = dist) -> None:
        self._library = library
        # Functions of torch.distributed with the arguments of a backend's.
        same = ("isend", "irecv", "all_reduce", "reduce", "broadcast", "P2POp", "batch_isend_irecv")
        for name in same:
            setattr(self, name, getattr(library, name))

    def join(self, world: World, timeout_s: float) -> None:
        """Joins the world; CommError: this torch or this machine has no NCCL."""
        if not self._library.is_nccl_available():
            raise CommError("this torch has no NCCL; use comm.backend=gloo, or a torch with CUDA")
        rendezvous.choose_interface(world)
        store = rendezvous.store(world, timeout_s, "nccl")
        self.rank, self._patience = world.rank, datetime.timedelta(seconds=timeout_s)
        place = world.size, world.rank, store
        self._library.init_process_group(BOTH, None, self._patience, *place)
        self._double_nccl(self._library.group.WORLD)
        self._all = Members([*range(world.size)], world.rank, timeout_s)

    def destroy_process_group(self) -> None:
        """Leaves the world."""
        self._all = None
        self._library.destroy_process_group()

    def new_group(self, ranks: list[int], timeout: datetime.timedelta | None = None) -> Any:
        """Makes a group for sums and gathers; all ranks of the world call it in one order."""
        group = self._library.new_group(ranks, timeout or self._patience, BOTH)
        if timeout is None and self.rank in ranks:
            self._double_nccl(group)
        return group

    def members(self, group: Any) -> Members:
        """Returns the ranks of a group, or of the world."""
        if group is None:
            return self._all  # type: ignore[no-any-return]
        ranks = self._library.get_process_group_ranks(group)
        return Members(ranks, ranks.index(self.rank), self._all.timeout_s)

    def destroy_group(self, group: Any) -> None:
        """Ends the communicators of a group."""
        self._library.destroy_process_group(group)

    def new_channel(self, ranks: list[int]) -> Any:
        """Makes a group for messages alone, which has a communicator and a stream of its own."""
        return self._library.new_group(ranks, 2 * self._patience, "nccl")

    def _double_nccl(self, group: Any) -> None:
        # StreamWaits name the operation that is late. NCCL's own watchdog ends the process and
        # names none. It counts from the post, so it gets twice the time.
        group._get_backend(torch.device("cuda"))._set_default_timeout(2 * self._patience)

    def abort(self) -> None:
        """Ends what is under way on all communicators, whose kernels would run for ever."""
        # In a thread, since ncclCommAbort may wait for a network that is gone.
        end = self._library.distributed_c10d._abort_process_group
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_ABORT_S)

    def all_gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Fills a tensor for each rank."""
        row = row_of(outputs)
        if row is None:
            return self._library.all_gather([*outputs], tensor, group, async_op)
        return self._library.all_gather_single(row, tensor.view(-1), group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces a tensor for each rank, and leaves on each its own."""
        row = row_of(inputs)
        if row is None:
            return self._library.reduce_scatter(output, [*inputs], op, group, async_op)
        return self._library.reduce_scatter_single(output.view(-1), row, op, group, async_op)

    def exchange(
        self,
        outputs: Inputs,
        inputs: Inputs,
        group: Any = None,
        async_op: bool = False,
        then: Callable[[], Any] | None = None,
    ) -> Any:
        """Sends a tensor to each rank and fills one from each, as one group call."""
        among = self.members(group)
        pairs = [(self.irecv, outputs), (self.isend, inputs)]
        ops = [
            self._library.P2POp(post, tensor, among.ranks[place], group)
            for post, tensors in pairs
            for place, tensor in enumerate(tensors)
            if tensor is not None and place != among.index
        ]
        into, out_of = outputs[among.index], inputs[among.index]
        if into is not None and out_of is not None and into is not out_of:
            into.view(-1).copy_(out_of.view(-1))
        works = self._library.batch_isend_irecv(ops) if ops else []
        return finished(JoinedWork(works, then), async_op)

    def barrier(self, group: Any = None, async_op: bool = False) -> Any:
        """Brings the ranks together through the host: NCCL's own barrier would need a GPU."""
        return self._library.all_reduce(torch.zeros(1), group=group, async_op=async_op)
