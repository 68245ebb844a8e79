"""Numbers at the limits of every type with their exact reductions, and tensors of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.core.ranks.world import World
from tests.helpers.operations import FOLDS, OF_BOOLS, Op, folded

PREMUL = dist._make_nccl_premul_sum(0.5)
OPS = (*FOLDS, Op.AVG, PREMUL)
Make = Callable[[], Tensor]


def limits(dtype: torch.dtype, rank: int) -> Tensor:
    """Returns the numbers of a rank: each place has numbers of one sign, and of one rank NaN."""
    if dtype == torch.bool:
        return torch.tensor([True, False, rank == 1, rank != 1]).repeat(3)
    if dtype.is_complex:
        part = limits(torch.float64 if dtype == torch.complex128 else torch.float32, rank)
        return torch.complex(part, part)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        own = [info.max, info.min, info.max - rank, info.min + rank, rank, 3, info.max // 2 + 1]
        return torch.tensor([*own, 0 if info.min == 0 else -rank - 1], dtype=dtype).repeat(3)
    info, nan = torch.finfo(dtype), float("nan")
    own = [info.max, info.min, info.tiny, float("inf"), -float("inf"), 1.0 + rank, -2.0, 0.0, 0.5]
    broken = [nan if rank == 0 else 1.0, nan if rank == 1 else -1.0, -nan if rank == 1 else 3.0]
    return torch.tensor([*own, *broken], dtype=dtype).repeat(3)


def reduced(terms: list[Tensor], op: Any) -> Tensor | None:
    """Returns the reduction in exact arithmetic; None: it is not defined."""
    dtype, name = terms[0].dtype, getattr(op, "op", op)
    is_float, is_bits = dtype.is_floating_point, name in (Op.BAND, Op.BOR, Op.BXOR)
    if dtype.is_complex:
        if name not in (Op.SUM, Op.AVG, Op.PREMUL_SUM):
            return None
        total = reduced([torch.view_as_real(term) for term in terms], op)
        assert total is not None
        return torch.view_as_complex(total)
    if dtype == torch.bool:
        return folded(terms, name) if name in OF_BOOLS else None
    if (is_bits and is_float) or (name == Op.PREMUL_SUM and not is_float):
        return None
    if is_bits or name in (Op.MIN, Op.MAX):
        return folded(terms, name)
    columns = zip(*(term.flatten().tolist() for term in terms), strict=True)
    numbers = [_number(column, name, is_float) for column in columns]
    if is_float:
        return torch.tensor(numbers, dtype=torch.float64).to(dtype).view(terms[0].shape)
    info = torch.iinfo(dtype)
    wrapped = [(number - info.min) % 2**info.bits + info.min for number in numbers]
    return torch.tensor(wrapped, dtype=dtype).view(terms[0].shape)


def _number(column: tuple[Any, ...], name: Any, is_float: bool) -> Any:
    if is_float and not all(abs(one) < float("inf") for one in column):
        return sum(column) if name != Op.PRODUCT else torch.tensor(column).prod().item()
    exact = Fraction(1) if name == Op.PRODUCT else Fraction(0)
    for one in map(Fraction, column):
        exact = exact * one if name == Op.PRODUCT else exact + one
    if name in (Op.AVG, Op.PREMUL_SUM):
        exact /= len(column) if name == Op.AVG else 2
    if not is_float:
        return int(exact)  # towards zero
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else -float("inf")


def difference(output: Tensor, wanted: Tensor) -> str:
    """Returns how two tensors differ beyond rounding; empty: they do not."""
    if output.dtype != wanted.dtype or output.shape != wanted.shape:
        return f"{output.dtype} {[*output.shape]} for {wanted.dtype} {[*wanted.shape]}"
    if output.is_complex():
        output, wanted = torch.view_as_real(output), torch.view_as_real(wanted)
    if not output.is_floating_point():
        return "" if torch.equal(output, wanted) else f"{output.tolist()} for {wanted.tolist()}"
    rtol, pair = 4 * torch.finfo(output.dtype).eps, (output.double(), wanted.double())
    near = torch.isclose(*pair, rtol=rtol, atol=0, equal_nan=True)
    return "" if bool(near.all()) else f"{output.tolist()} for {wanted.tolist()}"


def kinds(rank: int) -> dict[str, Make]:
    """Returns tensors of four numbers of each kind that hires carries."""

    def inference() -> Tensor:
        with torch.inference_mode():
            return torch.full((4,), 1.0 + rank)

    def plain(*shape: int) -> Tensor:
        return torch.full(shape, 1.0 + rank)

    return {
        "inference": inference,
        "inference view": lambda: inference()[::2],
        "leaf": lambda: plain(4).requires_grad_(),
        "not a leaf": lambda: plain(4).requires_grad_() * 1,
        "parameter": lambda: torch.nn.Parameter(plain(4)),
        "0-d": plain,
        "empty rows": lambda: plain(0, 3),
        "strided": lambda: plain(4, 4).t()[::2],
        "channels last": lambda: plain(1, 2, 2, 2).to(memory_format=torch.channels_last),
        "conjugate": lambda: torch.complex(plain(4), plain(4)).conj(),
        "negative": lambda: torch.complex(plain(4), plain(4)).conj().imag,
    }


def refused() -> dict[str, Make]:
    """Returns tensors of each kind that no rank can be sent, by what an error must name."""
    ones = torch.ones(4)
    return {
        "sparse_coo": ones.to_sparse,
        "sparse_csr": lambda: torch.ones(2, 2).to_sparse_csr(),
        "quint8": lambda: torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": lambda: torch.ones(4, device="meta"),
        "expanded": lambda: torch.ones(1).expand(4),
        "overlap": lambda: torch.ones(5).as_strided((2, 3), (1, 1)),
    }


def calls_with(make: Make, world: World) -> Iterator[tuple[str, tuple[Any, ...], Any, list[int]]]:
    """Yields operation, arguments, outputs, and what each output is of the first rank's tensor."""
    rank, every, is_root = world.rank, [*range(1, world.size + 1)], world.rank == 0
    one, few = make, lambda: [make() for _ in every]
    yield "all_reduce", (x := one(),), [x], [sum(every)]
    yield "reduce", (x := one(), 0), [x], [sum(every) if is_root else 1 + rank]
    yield "broadcast", (x := one(), 1), [x], [2]
    yield "all_gather", (parts := few(), one()), parts, every
    outputs = few() if is_root else None
    yield "gather", (one(), outputs, 0), outputs or [], every if is_root else []
    yield "scatter", (x := one(), few() if is_root else None, 0), [x], [1]
    yield "reduce_scatter", (x := one(), few()), [x], [sum(every)]
    yield "all_to_all", (parts := few(), few()), parts, every
