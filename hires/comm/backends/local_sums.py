"""Reduces tensors of one rank, for backends that only move bytes.

Terms are combined in the order of the ranks, left to right, so that the bits are the same wherever
it is done. fp16 and bf16 are combined in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_ORDER = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
COMBINE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
"""Operation -> what it does with two tensors."""


def reduce_in_order(terms: Sequence[Tensor], op: Any, out: Tensor) -> None:
    """Writes the reduction of one tensor of every rank, in rank order; all have one shape and type.

    ``out`` may be one of them. ValueError: the type has no such reduction, as a maximum of complex
    numbers or the bits of a float.
    """
    if not has_reduction(op, out.dtype):
        raise ValueError(f"{out.dtype} has no reduction {op}")
    combine, halves = COMBINE[op], out.dtype in HALVES
    total = terms[0].float() if halves else terms[0]
    for position, term in enumerate(terms[1:]):
        given = term.float() if halves else term
        # The first sum makes a tensor of its own; the others are added to that.
        total = combine(total, given, out=total) if position else combine(total, given)
    out.copy_(total)


def has_reduction(op: Any, dtype: torch.dtype) -> bool:
    """Whether numbers of a type can be reduced so."""
    if op in BITS:
        return not (dtype.is_floating_point or dtype.is_complex)
    return op in COMBINE and not (op in _ORDER and dtype.is_complex)
