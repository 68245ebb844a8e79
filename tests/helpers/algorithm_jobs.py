"""What ranks do to try the algorithms of ``hires.comm`` on pretended nodes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.comm import Group, ReduceOp
from hires.core.errors import CommError
from hires.core.ranks.world import World
from hires.plan.algorithm_steps import STAGED
from hires.plan.routes import Route

SIZES = (0, 1, 7, 300)
SEGMENT_BYTES = 64
OPS = {"SUM": torch.add, "PRODUCT": torch.mul, "MAX": torch.maximum}
TYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8)
STAGES = ("two_step", "hierarchical")
"""Algorithms of several stages."""


def values(dtype: torch.dtype, size: int, rank: int) -> Tensor:
    """Returns what a rank gives: small whole numbers, so that every order adds exactly."""
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randint(0, 4, (size,), generator=generator).to(dtype)


def every_algorithm(world: World, nodes: list[int], backend: str = "gloo") -> list[str]:
    """Returns what came out wrong, of all algorithms, types and sizes, on nodes of so many."""
    firsts = [*itertools.accumulate([0, *nodes])]
    node = max(number for number, first in enumerate(firsts) if first <= world.rank)
    there = {"local_rank": world.rank - firsts[node], "local_size": nodes[node]}
    comm.init(
        [backend],
        world=dataclasses.replace(world, **there),
        timeout_s=30.0,
        algorithms=STAGES,
        check="off",
    )
    others = comm.new_group(range(1, world.size))
    wrong: list[str] = []
    for size, dtype, (algorithm, segment) in itertools.product(
        SIZES,
        TYPES,
        [("segmented", SEGMENT_BYTES), *itertools.product((*STAGES, "direct"), (0, SEGMENT_BYTES))],
    ):
        route = Route(backend, algorithm, segment if algorithm != "direct" else 0)
        wrong += _Trial(route, dtype, size).run()
    wrong += _several_at_once(backend) + _others(backend, others)
    comm.shutdown()
    return wrong


class _Trial:
    """All operations of one algorithm on tensors of one type and size."""

    def __init__(self, route: Route, dtype: torch.dtype, size: int) -> None:
        self.route, self.rank = route, comm.get_rank()
        self.terms = [values(dtype, size, rank) for rank in range(comm.get_world_size())]
        self.wrong: list[str] = []

    def run(self) -> list[str]:
        """Returns what came out wrong."""
        for name, combine in OPS.items():
            expected = self.terms[0]
            for term in self.terms[1:]:
                expected = combine(expected, term)
            op = getattr(ReduceOp, name)
            self._compare(comm.all_reduce, expected, (op,))
            if self.rank == 1 or not self._has("reduce"):
                self._compare(comm.reduce, expected, (1, op))
            else:
                self._compare(comm.reduce, self.terms[self.rank], (1, op))
        for src in range(len(self.terms)):
            self._compare(comm.broadcast, self.terms[src], (src,))
        own = self.terms[self.rank]
        rows = own.new_zeros(len(self.terms), own.numel())
        for function, output in (
            (comm.all_gather, [*rows]),
            (comm.all_gather_into_tensor, rows),
        ):
            if self._has(function.__name__):
                rows.zero_()
                function(output, own, backend=self.route)
                if not torch.equal(rows, torch.stack(self.terms)):
                    self.wrong.append(f"{function.__name__} {self.route} {own.dtype}")
        return self.wrong

    def _has(self, operation: str) -> bool:
        return operation in STAGED[self.route.algorithm]

    def _compare(self, function: Any, expected: Tensor, args: tuple[Any, ...]) -> None:
        if not self._has(function.__name__):
            return
        for async_op in (False, True):
            given = self.terms[self.rank].clone()
            handle = function(given, *args, async_op=async_op, backend=self.route)
            if handle is not None:
                handle.wait()
            if not torch.equal(given, expected):
                what = f"{function.__name__} {args} {self.route} {given.dtype}"
                self.wrong.append(f"{what} {given.numel()} async {async_op}")


def _several_at_once(backend: str) -> list[str]:
    # Ranks wait in opposite orders for what all began in one; between them a rank that waits for a
    # message gives no time to what it began: other ranks must not need it for that.
    rank, size = comm.get_rank(), comm.get_world_size()
    names = ["two_step", "hierarchical", "segmented", "direct"]
    tensors = [torch.full((50 + 3 * i,), float(rank + i)) for i in range(12)]
    routes = [Route(backend, name, 0 if name == "direct" else 32) for name in names]
    handles = [
        comm.all_reduce(tensor, async_op=True, backend=routes[i % 4])
        for i, tensor in enumerate(tensors)
    ]
    token = torch.zeros(1)
    if rank == size - 1:
        comm.recv(token, 0, tag=5)
    else:
        for handle in reversed(handles):
            handle.wait()
    if rank == 0:
        comm.send(token, size - 1, tag=5)
    for handle in handles:
        handle.wait()
    sums = [sum(one + i for one in range(size)) for i in range(12)]
    pairs = zip(tensors, sums, strict=True)
    return [f"all at once {i}" for i, (t, s) in enumerate(pairs) if not bool((t == s).all())]


def _others(backend: str, others: Group) -> list[str]:
    # Averages over nodes of unequal size, bool and complex numbers, unequal rows, a smaller group.
    rank, size, wrong = comm.get_rank(), comm.get_world_size(), []
    number = sum(range(size))
    for algorithm in STAGES:
        route = Route(backend, algorithm)
        average = torch.full((5,), float(rank))
        comm.all_reduce(average, ReduceOp.AVG, backend=route)
        truths = torch.tensor([rank == 1, False])
        comm.all_reduce(truths, backend=route)
        pair = torch.tensor([complex(1, rank)])
        comm.all_reduce(pair, backend=route)
        found = average.tolist(), truths.tolist(), pair.tolist()
        if found != ([number / size] * 5, [True, False], [complex(size, number)]):
            wrong.append(f"{algorithm} {found}")
        if others.index >= 0:
            one = torch.tensor([float(rank)])
            comm.all_reduce(one, group=others, backend=route)
            wrong += [] if one.item() == number else [f"{algorithm} of others {one}"]
    rows = [torch.zeros(3 * one) for one in range(size)]
    given = torch.full((3 * rank,), 7.0)
    comm.all_gather(rows, given, backend=Route(backend, "segmented", 8))
    wrong += [f"row {i}" for i, row in enumerate(rows) if row.tolist() != [7.0] * 3 * i]
    try:
        comm.broadcast(torch.zeros(1), 0, backend=Route(backend, "two_step"))
    except CommError as error:
        return wrong if "two_step cannot carry out broadcast" in str(error) else [str(error)]
    return ["a broadcast in two steps"]


def unopened(world: World) -> str:
    """Returns what is said of an algorithm whose communicators were not made."""
    comm.init(["gloo"], world=world, timeout_s=30.0)
    try:
        comm.all_reduce(torch.zeros(1), backend=Route("gloo", "two_step"))
    except CommError as error:
        return str(error)
    finally:
        comm.shutdown()
    return ""
