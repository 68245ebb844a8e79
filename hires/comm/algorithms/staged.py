"""Carries out a collective in pieces, and in the stages of :mod:`hires.plan.algorithm_steps`.

An algorithm of one stage begins all of its pieces at once, in the caller's thread. One of several
stages runs in the queue of its group (:mod:`hires.comm.backends.fifo`), which issues a later stage
when an earlier one is over, whether this rank waits for it or not: other ranks may need that stage
before they can do what this rank waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from hires.comm.algorithms.algorithm_group import AlgorithmGroup
from hires.comm.backends.backend_protocol import SUM, Backend, Work
from hires.comm.backends.joined_work import JoinedWork
from hires.plan.algorithm_steps import AlgorithmStage, order, pieces
from hires.plan.algorithm_steps import stages as stages_of
from hires.plan.routes import Route


def all_reduce(
    backend: Backend,
    group: AlgorithmGroup,
    route: Route,
    tensor: Tensor,
    op: Any = SUM,
    async_op: bool = False,
) -> Work | None:
    """Reduces a contiguous tensor in place."""
    parts, flat = _Pieces(backend, group, route, "all_reduce"), tensor.view(-1)
    carry_out = _two_step if route.algorithm == "two_step" else _in_place
    return parts.begin(functools.partial(carry_out, parts, flat, op), [tensor], async_op)


def reduce(
    backend: Backend,
    group: AlgorithmGroup,
    route: Route,
    tensor: Tensor,
    dst: int,
    op: Any = SUM,
    async_op: bool = False,
) -> Work | None:
    """Reduces a contiguous tensor to rank ``dst``; that of the others has no meaning then."""
    parts = _Pieces(backend, group, route, "reduce", dst)
    return parts.begin(functools.partial(_in_place, parts, tensor.view(-1), op), [tensor], async_op)


def broadcast(
    backend: Backend,
    group: AlgorithmGroup,
    route: Route,
    tensor: Tensor,
    src: int,
    async_op: bool = False,
) -> Work | None:
    """Fills a contiguous tensor with that of rank ``src``."""
    parts = _Pieces(backend, group, route, "broadcast", src)
    return parts.begin(
        functools.partial(_in_place, parts, tensor.view(-1), None), [tensor], async_op
    )


def all_gather(
    backend: Backend,
    group: AlgorithmGroup,
    route: Route,
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    async_op: bool = False,
) -> Work | None:
    """Fills one tensor for each rank, whose sizes may differ, a segment of each at once."""
    parts = _Pieces(backend, group, route, "all_gather")
    rows, own = [one.view(-1) for one in tensor_list], tensor.view(-1)

    def run() -> list[Work]:
        # Every rank has all sizes, and so the same number of pieces; the last ones may be empty.
        ends = pieces(max(row.numel() for row in rows), own.element_size(), route.segment_bytes)
        handle = group.handles[parts.stages[0].communicator]
        return [
            backend.all_gather([row[a:b] for row in rows], own[a:b], handle, async_op=True)
            for a, b in ends
        ]

    return parts.begin(run, [*tensor_list], async_op)


def all_gather_into_tensor(
    backend: Backend,
    group: AlgorithmGroup,
    route: Route,
    output_tensor: Tensor,
    input_tensor: Tensor,
    async_op: bool = False,
) -> Work | None:
    """Fills the parts of a tensor with those of all ranks."""
    rows = output_tensor.view(len(group.ranks), -1)
    return all_gather(backend, group, route, [*rows], input_tensor, async_op)


class _Pieces:
    """One operation in pieces: issues them in the order of the plan."""

    def __init__(
        self,
        backend: Backend,
        group: AlgorithmGroup,
        route: Route,
        operation: str,
        root: int = -1,
    ) -> None:
        self.backend, self.group, self.route, self.operation = backend, group, route, operation
        facts = operation, route.algorithm, group.ranks, group.nodes, group.rank, root
        self.stages = stages_of(*facts)

    def begin(
        self, run: Callable[[], list[Work]], tensors: Sequence[Tensor], async_op: bool
    ) -> Work | None:
        """Runs it, which returns what is still under way; with ``async_op`` without waiting."""
        if self.route.algorithm == "segmented" or getattr(self.backend, "has_streams", False):
            # Nothing waits on the host: all pieces are begun at once, or streams wait.
            work = JoinedWork(run())
            if async_op:
                return work
            work.wait()
            return None
        what = f"{self.operation} ({self.route}) among ranks {[*self.group.ranks]}"
        if async_op:
            return self.group.queue.begin(lambda: _wait(run()), tensors, what)
        self.group.queue.run(lambda: _wait(run()), what=what)
        return None

    def issue(self, parts: int, begin: Callable[[AlgorithmStage, Any, int], Work]) -> list[Work]:
        """Begins every stage of every part, each after its last one; returns the last works."""
        works: list[Any] = [None] * parts
        for number, part in order(len(self.stages), parts):
            stage = self.stages[number]
            if works[part] is not None:
                works[part].wait()
            works[part] = begin(stage, self.group.handles[stage.communicator], part)
        return [work for work in works if work is not None]


def _in_place(parts: _Pieces, flat: Tensor, op: Any) -> list[Work]:
    # Sums and broadcasts in place, in each stage of the whole piece.
    cut = [
        flat[a:b] for a, b in pieces(flat.numel(), flat.element_size(), parts.route.segment_bytes)
    ]
    backend = parts.backend

    def begin(stage: AlgorithmStage, handle: Any, part: int) -> Any:
        if stage.operation == "all_reduce":
            return backend.all_reduce(cut[part], op, handle, async_op=True)
        if stage.operation == "reduce":
            return backend.reduce(cut[part], stage.root, op, handle, async_op=True)
        return backend.broadcast(cut[part], stage.root, handle, async_op=True)

    return parts.issue(len(cut), begin)


def _two_step(parts: _Pieces, flat: Tensor, op: Any) -> list[Work]:
    backend, width, size = parts.backend, len(parts.group.ranks), flat.numel()
    even = size - size % width  # what all ranks share evenly; the others sum the rest
    unit = width * flat.element_size()
    cut = [
        flat[a * width : b * width]
        for a, b in pieces(even // width, unit, parts.route.segment_bytes)
    ]
    shares = [flat.new_empty(piece.numel() // width) for piece in cut]
    works: list[Any] = []
    if even < size:
        handle = parts.group.handles[parts.stages[0].communicator]
        works.append(backend.all_reduce(flat[even:], op, handle, async_op=True))

    def begin(stage: AlgorithmStage, handle: Any, part: int) -> Any:
        if stage.operation == "reduce_scatter_tensor":
            return backend.reduce_scatter_tensor(shares[part], cut[part], op, handle, async_op=True)
        return backend.all_gather_into_tensor(cut[part], shares[part], handle, async_op=True)

    return works + (parts.issue(len(cut), begin) if even else [])


def _wait(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()
