"""Brings reductions to what every backend has: plain operations on real numbers.

AVG           the sum of whole numbers is exact, and rounded towards zero; halves are summed in
              fp32, others as parts of a power of two, so that it only overflows where the mean does
PREMUL_SUM    the terms are multiplied first
MIN, MAX      floats as whole numbers of the same order, as libraries lose NaN
small ints    of 8 and 16 bits, in int32, whose lower bits are the same
bool          as 0 and 1 in int32: a sum is an "or", a product an "and"
complex       a sum of twice as many real numbers

Sums and products of whole numbers wrap, as torch's own do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends.backend import HALVES
from hires.core.errors import CommError

ReduceOp = dist.ReduceOp
SUM = ReduceOp.SUM
_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_KINDS = (SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *_BITS)
_OF_TRUTHS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
_FLOATS = (torch.float64, torch.float32, *HALVES)
PLAIN = (*_FLOATS, torch.int64, torch.int32)
"""Types whose sums every backend has."""
_NARROW = (torch.int16, torch.int8, torch.uint8, torch.bool)
REDUCED = (*PLAIN, *_NARROW, torch.complex128, torch.complex64)
"""Types that are reduced; the others only travel."""


_Map = Callable[[Tensor], Tensor]


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
    return op is SUM and dtype in PLAIN


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
    scales = name in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    kind = ReduceOp.SUM if scales else name
    if kind not in _KINDS:
        names = ", ".join(one.name for one in _KINDS)
        raise CommError(f"unknown reduction {op!r}; choose one of {names}, AVG, PREMUL_SUM")
    is_bool, is_float = dtype == torch.bool, dtype in _FLOATS
    lacks_bits = kind in _BITS and (dtype.is_complex or is_float)
    lacks_order = dtype.is_complex and kind != ReduceOp.SUM
    lacks_factor = name == ReduceOp.PREMUL_SUM and not (dtype.is_complex or is_float)
    if lacks_bits or lacks_order or lacks_factor or (is_bool and scales):
        word = str(name).rpartition(".")[2]
        raise CommError(f"{word} of {dtype} is not defined; reduce another type, or use SUM")
    if is_bool:
        kind = _OF_TRUTHS.get(kind, kind)
    # A sum of complex numbers is one of twice as many real ones.
    convert: _Map
    back: _Map
    reals = torch.view_as_real if dtype.is_complex else _same
    terms, result = [*map(reals, given)], reals(output)
    if name == ReduceOp.PREMUL_SUM:
        convert, back = _product(op.factor), _same
    elif name == ReduceOp.AVG:
        convert, back = _mean(num_ranks) if result.is_floating_point() else _whole_mean(num_ranks)
    elif is_float and kind in (ReduceOp.MIN, ReduceOp.MAX):
        convert, back = _order(kind == ReduceOp.MAX)
    elif dtype in _NARROW:
        convert, back = Tensor.int, _same
    else:
        return PlainReduction(terms, result, kind, [])
    sent = [*map(convert, terms)]
    received = sent[0] if given[0] is output else convert(result)
    return PlainReduction(sent, received, kind, [lambda: result.copy_(back(received))])


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _product(factor: Any) -> _Map:
    return lambda term: (term * factor).to(term.dtype)


def _wide(term: Tensor) -> Tensor:
    return term.float() if term.dtype in HALVES else term


def _mean(num_ranks: int) -> tuple[_Map, _Map]:
    # Parts by a power of two have the same digits, and a sum of them overflows only if it must.
    share = 2.0 ** -(num_ranks - 1).bit_length()
    return lambda term: _wide(term) * share, lambda total: total / (num_ranks * share)


def _whole_mean(num_ranks: int) -> tuple[_Map, _Map]:
    # The quotients and the remainders are summed: neither overflows.
    def convert(term: Tensor) -> Tensor:
        wide = term.long()
        floor = wide.div(num_ranks, rounding_mode="floor")
        return torch.stack((floor, wide - floor * num_ranks), -1)

    def back(total: Tensor) -> Tensor:
        floors, remainders = total.unbind(-1)
        floor = floors + remainders // num_ranks
        return floor + ((floor < 0) & (remainders % num_ranks > 0))

    return convert, back


def _order(is_max: bool) -> tuple[_Map, _Map]:
    # Whole numbers in the order of the floats with these bits, and NaN beyond all of them:
    #
    #     floats    -inf   -1.0   -0.0   0.0   1.0   inf   nan
    #     bits      negative: the larger the lower       positive: the larger the higher
    def mirrored(bits: Tensor) -> Tensor:
        info = torch.iinfo(bits.dtype)
        return bits ^ ((bits >> info.bits - 1) & info.max)

    def convert(term: Tensor) -> Tensor:
        wide = _wide(term)
        bits = mirrored(wide.view(torch.int64 if wide.itemsize == 8 else torch.int32))
        info = torch.iinfo(bits.dtype)
        return bits.masked_fill_(wide.isnan(), info.max if is_max else info.min)

    def back(bits: Tensor) -> Tensor:
        return mirrored(bits).view(torch.float64 if bits.itemsize == 8 else torch.float32)

    return convert, back
