"""Brings reductions to what every backend has: plain operations on real numbers.

AVG           the sum, divided afterwards; integers are rounded towards zero
PREMUL_SUM    the terms are multiplied first
bool          as bytes of 0 and 1: a sum is an "or", a product an "and"
complex       a sum of twice as many real numbers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hires.core.errors import CommError

ReduceOp = dist.ReduceOp
SUM = ReduceOp.SUM
_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_KINDS = (SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *_BITS)
_OF_TRUTHS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


class PlainReduction(NamedTuple):
    """A reduction as backends have it."""

    given: list[Tensor]
    """Tensors to reduce."""
    output: Tensor
    """Tensor of the result."""
    op: Any
    then: list[Callable[[], Any]]
    """Steps that follow its completion."""


def is_plain(dtype: torch.dtype, op: Any) -> bool:
    """Whether every backend has this reduction as it is."""
    return op is SUM and dtype is not torch.bool and not dtype.is_complex


def words_of(op: Any) -> Any:
    """Returns the part of an operation that all ranks share: without the factor of each."""
    return op if op is SUM else getattr(op, "op", op)  # torch has two types of operations


def plain(given: Sequence[Tensor], output: Tensor, op: Any, num_ranks: int) -> PlainReduction:
    """Returns a reduction that every backend has, of contiguous tensors of one type.

    CommError: there is none, as the largest of complex numbers.
    """
    if is_plain(output.dtype, op):
        return PlainReduction([*given], output, op, [])
    dtype, name = output.dtype, getattr(op, "op", op)  # torch has two types of operations
    factor = op.factor if name == ReduceOp.PREMUL_SUM else None
    scales = name in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    kind = ReduceOp.SUM if scales else name
    if kind not in _KINDS:
        names = ", ".join(one.name for one in _KINDS)
        raise CommError(f"unknown reduction {op!r}; choose one of {names}, AVG, PREMUL_SUM")
    is_bool, is_complex = dtype == torch.bool, dtype.is_complex
    lacks_bits = kind in _BITS and (is_complex or dtype.is_floating_point)
    lacks_order = is_complex and kind != ReduceOp.SUM
    if lacks_bits or lacks_order or (is_bool and scales):
        word = str(name).rpartition(".")[2]
        raise CommError(f"{word} of {dtype} is not defined; reduce another type, or use SUM")
    terms = [*given]
    if factor is not None:
        in_place = len(terms) == 1 and terms[0] is output
        terms = [output.mul_(factor)] if in_place else [term * factor for term in terms]
    then: list[Callable[[], Any]] = []
    if name == ReduceOp.AVG:
        then.append(_division(output, num_ranks))
    if is_bool:
        kind = _OF_TRUTHS.get(kind, kind)
        return PlainReduction(
            [t.view(torch.uint8) for t in terms], output.view(torch.uint8), kind, then
        )
    if is_complex:
        return PlainReduction([*map(_reals, terms)], _reals(output), kind, then)
    return PlainReduction(terms, output, kind, then)


def _reals(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor)


def _division(output: Tensor, num_ranks: int) -> Callable[[], Any]:
    whole = not (output.dtype.is_floating_point or output.dtype.is_complex)
    return lambda: output.div_(num_ranks, rounding_mode="trunc" if whole else None)
