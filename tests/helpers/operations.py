"""All operations as data: what each rank of a group gives, and what it must get.

Numbers are small and whole, so that sums are exact in every type and order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Op = dist.ReduceOp
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TYPES = (*FLOATS, *WHOLE, torch.bool, torch.complex128, torch.complex64)
CARRIED_ONLY = tuple(
    getattr(torch, name)
    for name in ("uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2")
)
"""Types that travel and are not reduced."""
FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    Op.SUM: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor
}  # fmt: skip
OF_BOOLS = FOLDS | {Op.SUM: torch.logical_or, Op.MAX: torch.logical_or}
OF_BOOLS |= {Op.PRODUCT: torch.logical_and, Op.MIN: torch.logical_and}
EVEN = ("broadcast", "all_gather_into_tensor", "all_reduce", "reduce", "reduce_scatter_tensor")
UNEVEN = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "all_to_all_single")
"""Operations whose tensors may have other sizes for each rank."""
Check = Callable[[], bool]


def values(dtype: torch.dtype, shape: Any, rank: int, seed: int = 0) -> Tensor:
    """Returns the numbers of a rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randint(0, 4, shape, generator=generator)
    if dtype == torch.bool:
        return numbers > 1
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double().flip(-1)).to(dtype)
    return numbers.to(dtype)


def folded(terms: list[Tensor], op: Any = Op.SUM) -> Tensor:
    """Returns the reduction, one term after the other."""
    function, total = (OF_BOOLS if terms[0].dtype == torch.bool else FOLDS)[op], terms[0]
    for term in terms[1:]:
        total = function(total, term)
    return total


@dataclass
class Members:
    """The ranks of one call."""

    rank: int
    ranks: list[int]
    dtype: torch.dtype
    root: int = 0
    """A place among ``ranks``."""
    op: Any = Op.SUM
    seed: int = 0

    def call(self, name: str, shape: Any, rows: list[int]) -> tuple[tuple[Any, ...], Check]:
        """Returns the arguments of an operation on this rank, and whether its result is right.

        ``shape`` is that of each rank's tensor in even forms; in the others rank i has
        (``rows[i]``, 2) numbers.
        """
        place, count, root = self.ranks.index(self.rank), len(self.ranks), self.ranks[self.root]
        is_root, is_even = self.rank == root, len({*rows}) == 1
        if name in EVEN:
            every = [self._of(i, shape) for i in range(count)]
            own = every[place].clone()
            output = torch.empty((count, *shape), dtype=self.dtype)
        else:
            every = [self._of(i, (rows[i], 2)) for i in range(count)]
            own = torch.empty_like(every[place])
            outputs = [torch.empty_like(one) for one in every]
        match name:
            case "barrier":
                return (), lambda: True
            case "broadcast":
                return (own, root), _equal(own, every[self.root])
            case "all_gather_into_tensor":
                return (output, own), _equal(output, torch.stack(every))
            case "all_reduce":
                return (own, self.op), _equal(own, folded(every, self.op))
            case "reduce":
                total = folded(every, self.op) if is_root else own
                return (own, root, self.op), _equal(own, total)
            case "reduce_scatter_tensor":
                terms = [[self._of(i, shape, n) for n in range(count)] for i in range(count)]
                total = folded([one[place] for one in terms], self.op)
                return (own, torch.stack(terms[place]), self.op), _equal(own, total)
            case "all_gather":
                return (outputs, every[place]), _equal(outputs, every)
            case "gather":
                check = _equal(outputs, every) if is_root else lambda: True
                return (every[place], outputs if is_root else None, root), check
            case "scatter":
                return (own, every if is_root else None, root), _equal(own, every[place])
            case "reduce_scatter":
                terms = [[self._of(i, (n, 2), n) for n in rows] for i in range(count)]
                total = folded([one[place] for one in terms], self.op)
                if is_root:  # the shape of one rank's output decides no route
                    own, total = own.view(-1), total.view(-1)
                return (own, terms[place], self.op), _equal(own, total)

        def sent(i: int, j: int) -> Tensor:
            return self._of(i, (rows[i] + (0 if is_even else j), 2), j)

        given, came = [sent(place, j) for j in range(count)], [sent(i, place) for i in range(count)]
        outputs = [torch.empty_like(one) for one in came]
        if name == "all_to_all":
            return (outputs, given), _equal(outputs, came)
        output = torch.empty_like(torch.cat(came))
        splits = [None, None] if is_even else [[*map(len, came)], [*map(len, given)]]
        return (output, torch.cat(given), *splits), _equal(output, torch.cat(came))

    def _of(self, place: int, shape: Any, number: int = 0) -> Tensor:
        return values(self.dtype, shape, self.ranks[place], 10_000 * self.seed + number)


def _equal(output: Any, wanted: Any) -> Check:
    pairs = [*zip(output, wanted, strict=True)] if isinstance(output, list) else [(output, wanted)]
    pairs = [(one, other.clone()) for one, other in pairs]
    return lambda: all(torch.equal(one, other) for one, other in pairs)
