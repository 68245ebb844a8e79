"""Calls the MPI library without hires, through mpi4py: the raw baseline."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from hires.bench.messages import LATENCY, MESSAGES, ROOT, BenchBuffers, Call, bind
from hires.comm.backends.mpi_types import TYPES
from hires.core.ranks import mpi_library

NAMES = {
    "all_reduce": "Allreduce",
    "reduce": "Reduce",
    "broadcast": "Bcast",
    "all_gather_into_tensor": "Allgather",
    "reduce_scatter_tensor": "Reduce_scatter_block",
    "all_to_all_single": "Alltoall",
    "gather": "Gather",
    "scatter": "Scatter",
    "barrier": "Barrier",
}
"""Operation -> MPI's own name."""


class RawMpi:
    """The library's own world, beside that of hires."""

    def __init__(self) -> None:
        self.mpi = mpi = mpi_library.load()
        if not mpi.Is_initialized():
            mpi.Init_thread(mpi.THREAD_SERIALIZED)
        self.world = mpi.COMM_WORLD.Dup()

    def bind(self, buffers: BenchBuffers) -> Call | None:
        """Returns a call through mpi4py; None: MPI has no such type."""
        name, root = buffers.operation, buffers.rank == ROOT
        input, output = self.spec(buffers.input), self.spec(buffers.output)
        if input is None or output is None:
            return None
        if name == LATENCY and buffers.peer >= 0:
            send = functools.partial(self.world.Send, input, buffers.peer, 1)
            receive = functools.partial(self.world.Recv, output, buffers.peer, 1)
            order = (send, receive) if root else (receive, send)
            return lambda: [call() for call in order]
        if name in MESSAGES:
            return bind(_Messages(self), buffers)
        arguments = {
            "all_reduce": (self.mpi.IN_PLACE, output),
            "reduce": (self.mpi.IN_PLACE, output) if root else (input, None),
            "gather": (input, output if root else None),
            "scatter": (input if root else None, output),
            "broadcast": (output,),
            "barrier": (),
        }
        words = arguments.get(name, (input, output))
        return functools.partial(getattr(self.world, NAMES[name]), *words)

    def spec(self, tensor: Tensor) -> list[Any] | None:
        """Returns a tensor as mpi4py takes it."""
        if tensor.dtype not in TYPES:
            return None
        buffer = self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [buffer, getattr(self.mpi, TYPES[tensor.dtype])]


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
