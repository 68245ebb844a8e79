"""Calls the MPI library without hires, through mpi4py: the raw baseline."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from hires.bench.messages import (
    BARRIER,
    MESSAGES,
    ROOT,
    BenchBuffers,
    Call,
    bind,
)
from hires.comm.backends.mpi_types import TYPES
from hires.core.ranks import mpi_library

NAMES = {
    "all_reduce": "allreduce",
    "reduce": "reduce",
    "broadcast": "bcast",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce_scatter_block",
    "all_to_all_single": "alltoall",
    "gather": "gather",
    "scatter": "scatter",
    BARRIER: "barrier",
}
"""Operation -> MPI's own name."""
ALIKE = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
"""Operations on lists of tensors, which lie side by side here -> those on one."""


class RawMpi:
    """The library's own world, beside that of hires."""

    def __init__(self) -> None:
        self.mpi = mpi = mpi_library.load()
        if not mpi.Is_initialized():
            mpi.Init_thread(mpi.THREAD_SERIALIZED)
        self.world = mpi.COMM_WORLD.Dup()

    def bind(self, buffers: BenchBuffers, blocking: bool) -> Call | None:
        """Returns a call through mpi4py; None: MPI has no such operation or type."""
        name = ALIKE.get(buffers.operation, buffers.operation)
        input, output = self.spec(buffers.input), self.spec(buffers.output)
        if input is None or output is None:
            return None
        if name in MESSAGES:
            return self._messages(buffers, input, output)
        if name not in NAMES:
            return None
        word = NAMES[name]
        function = getattr(self.world, word.capitalize() if blocking else f"I{word}")
        root, own = buffers.rank == ROOT, self.mpi.IN_PLACE
        words: tuple[Any, ...] = (input, output)
        if name == "all_reduce":
            words = (own, output)
        elif name == "reduce":
            words = (own, output) if root else (input, None)
        elif name in ("gather", "scatter"):
            words = (input, output if root else None)
            words = words if name == "gather" else (input if root else None, output)
        elif name == "broadcast":
            words = (output,)
        elif name == BARRIER:
            words = ()
        call = functools.partial(function, *words)
        return call if blocking else lambda: call().Wait()

    def spec(self, tensor: Tensor) -> list[Any] | None:
        """Returns a tensor as mpi4py takes it."""
        if tensor.dtype not in TYPES:
            return None
        buffer = self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [buffer, getattr(self.mpi, TYPES[tensor.dtype])]

    def _messages(self, buffers: BenchBuffers, input: Any, output: Any) -> Call:
        world, peer, first = self.world, buffers.peer, buffers.rank == ROOT
        if buffers.operation == "latency" and peer >= 0:
            send = functools.partial(world.Send, input, peer, 1)
            receive = functools.partial(world.Recv, output, peer, 1)
            order = (send, receive) if first else (receive, send)

            def ping_pong() -> None:
                order[0]()
                order[1]()

            return ping_pong
        return bind(_Messages(self), buffers, True)


class _Messages:
    """Messages with the names of ``torch.distributed``."""

    def __init__(self, raw: RawMpi) -> None:
        self._raw = raw

    def isend(self, tensor: Tensor, peer: int, *, tag: int) -> Any:
        return _Request(self._raw.world.Isend(self._raw.spec(tensor), peer, tag))

    def irecv(self, tensor: Tensor, peer: int, *, tag: int) -> Any:
        return _Request(self._raw.world.Irecv(self._raw.spec(tensor), peer, tag))


class _Request:
    def __init__(self, request: Any) -> None:
        self.wait = request.Wait
