"""Calls the MPI library without hires, through mpi4py: the raw baseline."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hires.bench.messages import MESSAGES, ROOT, BenchBuffers, Call, MessageCalls, bind
from hires.comm.backends.mpi_backend import TYPES
from hires.core.ranks import mpi_library
from hires.engine.device import RankDevice


class RawMpi:
    """The library's own world, beside that of hires; messages as ``torch.distributed`` has them."""

    def __init__(self, lock: Any) -> None:
        self.mpi, self.lock = mpi_library.load(), lock
        mpi_library.start(self.mpi)
        with lock:
            self.world = self.mpi.COMM_WORLD.Dup()
        self._specs: dict[int, tuple[Tensor, list[Any]]] = {}

    def bound(self, buffers: BenchBuffers, device: RankDevice, fence: Call) -> MessageCalls:
        """Returns the calls of a cell: hires.comm makes none meanwhile, so the fence is MPI's."""
        return MessageCalls(self.bind(buffers), buffers, device, self.world.Barrier, self.lock)

    def bind(self, buffers: BenchBuffers) -> Call:
        """Returns a call through mpi4py; KeyError: MPI has no such type."""
        root, here = buffers.rank == ROOT, self.mpi.IN_PLACE
        self._specs.clear()
        input, output = self.spec(buffers.input), self.spec(buffers.output)
        if buffers.operation in MESSAGES:
            return bind(self, buffers)
        calls = {
            "all_reduce": ("Allreduce", here, output),
            "reduce": ("Reduce", here, output) if root else ("Reduce", input, None),
            "broadcast": ("Bcast", output),
            "all_gather_into_tensor": ("Allgather", input, output),
            "reduce_scatter_tensor": ("Reduce_scatter_block", input, output),
            "all_to_all_single": ("Alltoall", input, output),
            "gather": ("Gather", input, output if root else None),
            "scatter": ("Scatter", input if root else None, output),
            "barrier": ("Barrier",),
        }
        name, *words = calls[buffers.operation]
        return functools.partial(getattr(self.world, name), *words)

    def spec(self, tensor: Tensor) -> list[Any]:
        """Returns a tensor as mpi4py takes it; it is kept until other buffers are bound."""
        if id(tensor) not in self._specs:
            buffer = self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
            self._specs[id(tensor)] = tensor, [buffer, getattr(self.mpi, TYPES[tensor.dtype])]
        return self._specs[id(tensor)][1]

    def __getattr__(self, name: str) -> Any:
        """Returns ``send``, ``recv``, ``isend`` or ``irecv``."""
        call = getattr(self.world, name.capitalize())

        def message(tensor: Tensor, peer: int, *, tag: int) -> Any:
            request = call(self.spec(tensor), peer, tag)
            return SimpleNamespace(wait=request.Wait) if request else None

        return message
