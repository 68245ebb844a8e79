"""Sums many tensors of which each rank needs a part, and gathers parts of many tensors.

Every rank names the same parts by member, as flat tensors of one type in the same order. They are
copied into buffers of equal rows, one for each member, some MiB at a time:

    parts of 0   a a a b b b b b         buffer 1   | a a a b | c c c d |
    parts of 1   c c c d d d             buffer 2   | b b b b | d d . . |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter as clock

import torch
from torch import Tensor

from hires.comm import message_log as logs
from hires.comm.operation_routes import Choice
from hires.comm.operations import all_gather_into_tensor, reduce_scatter_tensor
from hires.comm.transport import Group, transport, unlogged
from hires.plan.routes import Route

BUFFER_BYTES = 2**24
"""Most that the rows of all members take at a time, where they are copied."""
Parts = Sequence[Sequence[Tensor]]


def reduce_scatter_coalesced(parts: Parts, group: Group, *, backend: Choice = None) -> None:
    """Sums tensors over a group in place: on each member its own parts, by its place in the group.

    Those of the other members keep their numbers.
    """

    def through(place: int, rows: list[list[Tensor]], width: int, route: Choice) -> None:
        sent = _joined(rows, width)
        sums = sent.new_empty(width)
        reduce_scatter_tensor(sums, sent, group=group, backend=route)
        _divide(sums, rows[place])

    num_bytes = sum(tensor.nbytes for own in parts for tensor in own)
    _carry_out(parts, group, backend, through, logs.REDUCE_SCATTER, num_bytes)


def all_gather_coalesced(parts: Parts, group: Group, *, backend: Choice = None) -> None:
    """Fills the parts of the other members with theirs."""

    def through(place: int, rows: list[list[Tensor]], width: int, route: Choice) -> None:
        gathered = _joined(rows, width)
        own = gathered[place].clone()
        all_gather_into_tensor(gathered, own, group, backend=route)
        for index, row in enumerate(gathered):
            if index != place:
                _divide(row, rows[index])

    num_bytes = max(sum(tensor.nbytes for tensor in own) for own in parts)
    _carry_out(parts, group, backend, through, logs.ALL_GATHER, num_bytes)


def _carry_out(
    parts: Parts,
    group: Group,
    backend: Choice,
    through: Callable[[int, list[list[Tensor]], int, Choice], None],
    operation: int,
    num_bytes: int,
) -> None:
    if group.size == 1 or not any(tensor.numel() for own in parts for tensor in own):
        return
    issued, log = clock(), transport.log
    route = backend if isinstance(backend, Route) else Route(backend or transport.default)
    with unlogged:  # it is one operation, whatever it is made of
        for rows, width in _buffers(parts):
            through(group.index, rows, width, route)
    if log is not None:
        log.note_blocking(operation, logs.way(*route), num_bytes, issued)


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
