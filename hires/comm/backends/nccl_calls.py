"""Posts the calls of NCCL that are one operation, on the stream of a communicator, and its work."""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends.backend_protocol import Members
from hires.comm.backends.nccl_library import NcclLibrary
from hires.core.errors import PeerError

TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""Type -> ``ncclDataType_t``; other types move as bytes."""
BYTE = TYPES[torch.uint8]
REDUCTIONS = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.PRODUCT: 1,
    dist.ReduceOp.MAX: 2,
    dist.ReduceOp.MIN: 3,
    dist.ReduceOp.AVG: 4,
}
"""Reduction -> ``ncclRedOp_t``."""
_HOST_SCALAR = 1  # ncclScalarHostImmediate
_POLL_S = 1e-4


@dataclass(eq=False)
class NcclCommunicator(Members):
    """A communicator of NCCL and its stream; none where this rank is not a member."""

    comm: ctypes.c_void_p | None = None
    stream: Any = None
    is_open: bool = field(default=False)


class NcclPlace(NamedTuple):
    """Where NCCL works: the library, the device, and its streams and events, as ``torch.cuda``."""

    library: NcclLibrary
    device: torch.device
    module: Any


class StreamWork:
    """An operation on the stream of a communicator."""

    def __init__(self, place: NcclPlace, group: NcclCommunicator, event: Any) -> None:
        self._place, self._group, self._event = place, group, event
        self.back: list[tuple[Tensor, Tensor]] = []
        """Tensors of the host, and what stands for them on the device."""

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        return bool(self._event.query())

    def exception(self) -> BaseException | None:
        """Returns what the communicator reports; None: no error, so far."""
        said = self._place.library.error(self._group.comm)
        return None if said is None else PeerError(f"NCCL failed: {said}")

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Makes the caller's stream wait for it; with ``timeout``, or for the host, this process.

        CommError: it is late, or NCCL reports an error.
        """
        if timeout is not None or self.back:
            limit_s = self._group.timeout_s if timeout is None else timeout.total_seconds()
            self._finish(limit_s)
        self._place.module.current_stream().wait_event(self._event)
        for host, carried in self.back:
            host.copy_(carried)
        self.back = []
        return True

    def _finish(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not self._event.query():
            if (error := self.exception()) is not None:
                raise error
            if time.monotonic() > until:
                raise PeerError(f"an operation of NCCL took over {timeout_s:g} s")
            time.sleep(_POLL_S)


class NcclCalls:
    """The calls of one operation; ``work`` is what its caller gets."""

    def __init__(self, place: NcclPlace, group: NcclCommunicator) -> None:
        self._place, self.group = place, group
        self.work: StreamWork | None = None
        self._carried: dict[int, Tensor] = {}  # by the host tensor's identity
        self._stream = ctypes.c_void_p(group.stream.cuda_stream)
        self._custom: ctypes.c_int | None = None
        self._is_group = False

    def is_away(self, tensor: Tensor) -> bool:
        """Whether a tensor is of the host, and NCCL reads the device."""
        return tensor.device.type != self._place.device.type

    def carry(self, tensor: Tensor) -> Tensor:
        """Returns what stands for a tensor on the device."""
        if self.is_away(tensor):
            self._carried.setdefault(id(tensor), tensor.to(self._place.device))
        return self._carried.get(id(tensor), tensor)

    def of(self, *tensors: Tensor) -> list[Tensor]:
        """Returns what stands for tensors on the device."""
        return [self._carried.get(id(tensor), tensor) for tensor in tensors]

    def reduction(self, dtype: torch.dtype, op: Any) -> tuple[int, int] | None:
        """Returns NCCL's type and reduction; None: it has no such."""
        if dtype not in TYPES:
            return None
        if op == dist.ReduceOp.PREMUL_SUM:
            scalar = torch.tensor(_factor(op), dtype=dtype)
            self._custom = ctypes.c_int()
            arguments = (ctypes.byref(self._custom), scalar.data_ptr(), TYPES[dtype])
            self._place.library(
                "ncclRedOpCreatePreMulSum", *arguments, _HOST_SCALAR, self.group.comm
            )
            return TYPES[dtype], self._custom.value
        number = next((code for kind, code in REDUCTIONS.items() if op == kind), None)
        return None if number is None else (TYPES[dtype], number)

    def call(self, name: str, given: Tensor, taken: Tensor, count: int, *rest: int) -> None:
        """Posts a collective."""
        memory = given.data_ptr(), taken.data_ptr()
        self._place.library(name, *memory, count, *rest, self.group.comm, self._stream)
        self._settle(name)

    def message(self, name: str, tensor: Tensor, place: int) -> None:
        """Posts a send or receive; an empty one is none, on both sides."""
        if tensor.nbytes:
            memory, comm = tensor.data_ptr(), self.group.comm
            self._place.library(name, memory, tensor.nbytes, BYTE, place, comm, self._stream)

    def exchange(self, taken: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        """Posts messages from and to each position, its own too, as one group call."""
        with self.together():
            for place, (into, out_of) in enumerate(zip(taken, given, strict=True)):
                if out_of is not None:
                    self.message("ncclSend", out_of, place)
                if into is not None:
                    self.message("ncclRecv", into, place)

    def gathered(self, term: Tensor) -> list[Tensor]:
        """Returns the terms of all ranks, for a reduction that NCCL lacks."""
        terms = term.new_empty((len(self.group.ranks), *term.shape))
        self.call("ncclAllGather", term, terms, term.nbytes, BYTE)
        return [*terms]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Makes the calls of the block one group call."""
        self._place.library("ncclGroupStart")
        self._is_group = True
        try:
            yield
        finally:
            self._is_group = False
            self._place.library("ncclGroupEnd")
        self._settle("a group call")

    def _settle(self, what: str) -> None:
        if self._is_group:
            return
        group = self.group
        self._place.library.settle(group.comm, group.timeout_s, what)
        if self._custom is not None:
            self._place.library("ncclRedOpDestroy", self._custom, group.comm)
            self._custom = None


def _factor(op: Any) -> Any:
    factor = op.__getstate__()[1]
    return factor.item() if isinstance(factor, Tensor) else factor
