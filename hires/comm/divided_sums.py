"""Sums many tensors of which each rank needs a part, and gathers parts of many tensors.

Every rank names the same parts by member, as flat tensors of one type in the same order. Ranks that
read each other's memory work on them where they lie. Others copy them into buffers of equal rows,
one for each member, some MiB at a time:

    parts of 0   a a a b b b b b         buffer 1   | a a a b | c c c d |
    parts of 1   c c c d d d             buffer 2   | b b b b | d d . . |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter as clock

import torch
from torch import Tensor

from hires.comm import message_log as logs
from hires.comm.calls import BY_SHARES, note_shares
from hires.comm.guarded_waits import waiting
from hires.comm.operation_routes import Choice
from hires.comm.operations import all_gather_into_tensor, reduce_scatter_tensor
from hires.comm.transport import Group, transport, unlogged
from hires.plan.routes import SHARES, Route
from hires.plan.traffic import CALLED

BUFFER_BYTES = 2**24
"""Most that the rows of all members take at a time, where they are copied."""
Parts = Sequence[Sequence[Tensor]]


def reduce_scatter_coalesced(parts: Parts, group: Group, *, backend: Choice = None) -> None:
    """Sums tensors over a group in place: on each member its own parts, by its place in the group.

    Those of the other members keep their numbers. Without a ``backend`` ranks that read each
    other's memory do it there.
    """

    def through(place: int, rows: list[list[Tensor]], width: int, route: Choice) -> None:
        sent = _joined(rows, width)
        sums = sent.new_empty(width)
        reduce_scatter_tensor(sums, sent, group=group, backend=route)
        _divide(sums, rows[place])

    what = f"a reduce-scatter among ranks {group.ranks}"
    num_bytes = sum(tensor.nbytes for own in parts for tensor in own)
    _carry_out(
        parts, group, backend, through, (logs.REDUCE_SCATTER, "reduce_parts", what, num_bytes)
    )


def all_gather_coalesced(parts: Parts, group: Group, *, backend: Choice = None) -> None:
    """Fills the parts of the other members with theirs."""

    def through(place: int, rows: list[list[Tensor]], width: int, route: Choice) -> None:
        gathered = _joined(rows, width)
        own = gathered[place].clone()
        all_gather_into_tensor(gathered, own, group, backend=route)
        for index, row in enumerate(gathered):
            if index != place:
                _divide(row, rows[index])

    what = f"an all-gather among ranks {group.ranks}"
    num_bytes = max(sum(tensor.nbytes for tensor in own) for own in parts)
    _carry_out(parts, group, backend, through, (logs.ALL_GATHER, "read_parts", what, num_bytes))


def _carry_out(
    parts: Parts,
    group: Group,
    backend: Choice,
    through: Callable[[int, list[list[Tensor]], int, Choice], None],
    call: tuple[int, str, str, int],
) -> None:
    operation, _, _, num_bytes = call
    if group.size == 1 or not any(tensor.numel() for own in parts for tensor in own):
        return
    issued, log = clock(), transport.log
    with unlogged:  # it is one operation, whatever it is made of
        way = _by_route(parts, group, backend or BY_SHARES, through, call)
    if log is not None:
        log.note_blocking(operation, way, num_bytes, issued)


def _by_route(
    parts: Parts,
    group: Group,
    backend: Choice,
    through: Callable[[int, list[list[Tensor]], int, Choice], None],
    call: tuple[int, str, str, int],
) -> int:
    route = backend if isinstance(backend, Route) else Route(str(backend))
    if route.algorithm == SHARES and group.peers is not None:
        operation, method, what, num_bytes = call
        every = [tensor for own in parts for tensor in own]
        name = f"{CALLED[operation]}_coalesced"
        number = note_shares(group, name, num_bytes, every[0].dtype)
        staged = transport.staging(route.backend).of(every)
        if staged is not None:
            placed = iter(staged.fetch().parts)
            parts = [[next(placed) for _ in own] for own in parts]
        share = functools.partial(getattr(group.peers, method), parts)
        with contextlib.nullcontext() if staged is None else staged.put_after():
            waiting(share, what, -1, -1, tuple(group.ranks), "cma", number)
        return logs.way(*route, staged is not None)
    if route.algorithm == SHARES:
        route = Route(transport.default)
    for rows, width in _buffers(parts):
        through(group.index, rows, width, route)
    return logs.way(*route)


def _buffers(parts: Parts) -> Iterator[tuple[list[list[Tensor]], int]]:
    """Yields the parts in rows of at most BUFFER_BYTES in all, and the numbers of the longest."""
    longest = max(sum(tensor.numel() for tensor in own) for own in parts)
    width = next(tensor.element_size() for own in parts for tensor in own)
    most = max(1, BUFFER_BYTES // (width * len(parts)))
    for first in range(0, longest, most):
        rows = [[*_slices(own, first, first + most)] for own in parts]
        yield rows, min(most, longest - first)


def _slices(tensors: Sequence[Tensor], first: int, end: int) -> Iterator[Tensor]:
    begin = 0
    for tensor in tensors:
        size = tensor.numel()
        if begin < end and begin + size > first:
            yield tensor[max(0, first - begin) : end - begin]
        begin += size


def _joined(rows: list[list[Tensor]], width: int) -> Tensor:
    """Returns one tensor of rows of a width, which end in zeros."""
    like = next(tensor for row in rows for tensor in row)
    joined = like.new_zeros((len(rows), width))
    for row, tensors in zip(joined, rows, strict=True):
        if tensors:
            torch.cat(tensors, out=row[: sum(tensor.numel() for tensor in tensors)])
    return joined


def _divide(row: Tensor, tensors: list[Tensor]) -> None:
    parts = torch.split(row.view(-1)[: sum(map(len, tensors))], [*map(len, tensors)])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part)
