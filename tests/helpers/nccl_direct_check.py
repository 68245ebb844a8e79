"""Tries ``nccl_direct``: every operation, type and reduction against plain torch.

Numbers are small and whole, so that every order of additions gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends.nccl_direct import NcclDirectBackend

TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
Op = dist.ReduceOp


def wrong_results(
    backend: NcclDirectBackend, rank: int, num_ranks: int, device: torch.device
) -> list[str]:
    """Returns the operations that gave a wrong result on this rank, with the type."""
    wrong: list[str] = []
    for dtype in TYPES:
        terms = [
            torch.tensor([1, 3, place + 1], device=device).to(dtype) for place in range(num_ranks)
        ]
        checks = _Checks(backend, rank, terms)
        pairs = (*checks.reductions(), *checks.moves(), *checks.exchanges())
        wrong += [f"{what} {dtype}" for what, good in pairs if not good]
    return wrong


class _Checks:
    """What each rank gives in one type, and whether the operations on that are right."""

    def __init__(self, backend: NcclDirectBackend, rank: int, terms: list[Tensor]) -> None:
        self.backend, self.rank, self.terms = backend, rank, terms
        self.own, self.size, self.root = terms[rank], len(terms), len(terms) - 1

    def of(self, numbers: list[int]) -> Tensor:
        """Returns a tensor of this type."""
        return torch.tensor(numbers, device=self.own.device).to(self.own.dtype)

    def reductions(self) -> Iterator[tuple[str, bool]]:
        """Yields each reduction, and whether it was right."""
        for name, (op, expected) in self._kinds().items():
            for async_op in (False, True):
                one = self.own.clone()
                work = self.backend.all_reduce(one, op, async_op=async_op)
                if work is not None:
                    work.wait()
                yield f"all_reduce {name} async={async_op}", torch.equal(one, expected)
            one = self.own.clone()
            self.backend.reduce(one, self.root, op)
            yield f"reduce {name}", self.rank != self.root or torch.equal(one, expected)
            one = torch.zeros_like(self.own)
            self.backend.reduce_scatter(one, [self.own.clone() for _ in self.terms], op)
            yield f"reduce_scatter {name}", torch.equal(one, expected)
            one = torch.zeros_like(self.own)
            self.backend.reduce_scatter_tensor(one, torch.cat([self.own] * self.size), op)
            yield f"reduce_scatter_tensor {name}", torch.equal(one, expected)

    def moves(self) -> Iterator[tuple[str, bool]]:
        """Yields each operation that moves one tensor a rank, and whether it was right."""
        one = self.own.clone()
        self.backend.broadcast(one, self.root)
        yield "broadcast", torch.equal(one, self.terms[self.root])
        rows = [self.of([9] * place) for place in range(self.size)]  # one of them empty
        self.backend.all_gather(rows, self.of([self.rank + 1] * self.rank))
        expected = [[place + 1] * place for place in range(self.size)]
        yield "all_gather", [row.tolist() for row in rows] == expected
        whole = self.of([0] * 3 * self.size)
        self.backend.all_gather_into_tensor(whole, self.own)
        yield "all_gather_into_tensor", torch.equal(whole, torch.cat(self.terms))
        is_root = self.rank == self.root
        parts = [self.of([0] * 3) for _ in self.terms] if is_root else None
        self.backend.gather(self.own, parts, self.root)
        yield "gather", parts is None or torch.equal(torch.cat(parts), torch.cat(self.terms))
        one = self.of([0] * 3)
        self.backend.scatter(one, self.terms if is_root else None, self.root)
        yield "scatter", torch.equal(one, self.own)

    def exchanges(self) -> Iterator[tuple[str, bool]]:
        """Yields each operation between every two ranks, and whether it was right."""
        rank, size = self.rank, self.size
        got = [self.of([0] * (place + rank)) for place in range(size)]
        given = [self.of([rank + 1] * (place + rank)) for place in range(size)]
        self.backend.all_to_all(got, given)
        expected = [[place + 1] * (place + rank) for place in range(size)]
        yield "all_to_all", [one.tolist() for one in got] == expected
        filled = self.of([0] * size)
        self.backend.all_to_all_single(filled, self.of([size * rank + i for i in range(size)]))
        yield "all_to_all_single", filled.tolist() == [p * size + rank for p in range(size)]
        peer, one = (rank + 1) % size, self.of([0] * 3)
        ops = [
            self.backend.P2POp(self.backend.isend, self.own, peer),
            self.backend.P2POp(self.backend.irecv, one, (rank - 1) % size),
        ]
        for work in self.backend.batch_isend_irecv(ops):
            work.wait()
        yield "batch_isend_irecv", torch.equal(one, self.terms[rank - 1])

    def _kinds(self) -> dict[str, tuple[Any, Tensor]]:
        # Reduction -> what it is called with, and what should come out.
        stacked, dtype = torch.stack([term.double() for term in self.terms]), self.own.dtype
        kinds: dict[str, tuple[Any, Tensor]] = {
            "SUM": (Op.SUM, stacked.sum(0)),
            "PRODUCT": (Op.PRODUCT, stacked.prod(0)),
            "MAX": (Op.MAX, stacked.amax(0)),
            "MIN": (Op.MIN, stacked.amin(0)),
        }
        if dtype.is_floating_point:
            half = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
            kinds |= {"AVG": (Op.AVG, stacked.mean(0)), "PREMUL_SUM": (half, stacked.sum(0) / 2)}
        else:
            total = self.terms[0]
            for term in self.terms[1:]:
                total = total | term
            kinds["BOR"] = (Op.BOR, total)
        return {name: (op, result.to(dtype)) for name, (op, result) in kinds.items()}
