"""Chooses the type and the operation of MPI for a reduction of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.bool: "C_BOOL",
}
HALVES = (torch.float16, torch.bfloat16)
"""Types without a counterpart: they travel as 16 bits, and the operation is ours."""
SMALL = (torch.int16, torch.int8, torch.uint8)
"""Types of which Open MPI's sums do not wrap, and MPICH 4.0 takes 255 for -1: these are ours."""
REDUCTIONS: dict[Any, tuple[str, str, Callable[..., Tensor]]] = {
    dist.ReduceOp.SUM: ("SUM", "LOR", torch.add),
    dist.ReduceOp.MAX: ("MAX", "LOR", torch.maximum),
    dist.ReduceOp.MIN: ("MIN", "LAND", torch.minimum),
    dist.ReduceOp.PRODUCT: ("PROD", "LAND", torch.mul),
    dist.ReduceOp.BAND: ("BAND", "LAND", torch.bitwise_and),
    dist.ReduceOp.BOR: ("BOR", "LOR", torch.bitwise_or),
    dist.ReduceOp.BXOR: ("BXOR", "LXOR", torch.bitwise_xor),
}
"""Of numbers, of truth values, and of two tensors where the operation is ours."""
_BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


@functools.cache
def reduction(mpi: Any, dtype: torch.dtype, op: Any) -> tuple[MPI.Datatype, MPI.Op]:
    """Returns what MPI calls the type and the operation; ValueError: it has no such."""
    if op not in REDUCTIONS or dtype not in (*TYPES, *HALVES):
        raise ValueError(f"MPI has no reduction {op} of {dtype}")
    if dtype in HALVES:
        return mpi.UINT16_T, _our_operation(mpi, dtype, op)
    if dtype in SMALL and op not in _BITS:
        return getattr(mpi, TYPES[dtype]), _our_operation(mpi, dtype, op)
    numbers, truths, _ = REDUCTIONS[op]
    return getattr(mpi, TYPES[dtype]), getattr(mpi, truths if dtype == torch.bool else numbers)


@functools.cache
def _our_operation(mpi: Any, dtype: torch.dtype, op: Any) -> MPI.Op:
    combine = REDUCTIONS[op][2]

    def reduce(given: Any, result: Any, kind: Any) -> None:
        # MPI may call it with any part of the tensors, in the main thread or that of the progress.
        term, total = (torch.frombuffer(memory, dtype=dtype) for memory in (given, result))
        combine(term, total, out=total)

    created: MPI.Op = mpi.Op.Create(reduce, commute=True)
    return created
