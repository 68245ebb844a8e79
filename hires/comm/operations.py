"""The collectives of hires.comm: names, arguments and meaning of those of torch.distributed.

Ranks are ranks of the world. Every collective has ``async_op``: it returns None when it is
complete, or at once its :class:`~hires.comm.handles.Handle`. ``backend`` names a backend or a whole
:class:`~hires.plan.routes.Route`; without it the tuning table chooses, if there is one, else the
first backend carries the message. Lists of tensors may hold tensors of different sizes. All ranks
of a group call its collectives in one order. Errors are CommErrors.

Source:
    https://pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor

from hires.comm import message_log as logs
from hires.comm.argument_checks import (
    bytes_of,
    require_counts,
    require_members,
    require_one_each,
    require_rows,
    require_size,
)
from hires.comm.backends.backend import at
from hires.comm.calls import (
    Carriers,
    apart,
    in_normal_mode,
    is_dense,
    require_own_memory,
    start,
)
from hires.comm.comm_world import Group, group_or_all
from hires.comm.dispatch import Choice, call_of
from hires.comm.handles import Handle
from hires.comm.plain_reductions import SUM, is_plain, plain, words_of
from hires.core.errors import CommError

UNEVEN = 0
"""The size that decides where ranks may not share one: a route must be the same for all (R1)."""
_NOTHING = torch.empty(0)


@in_normal_mode
def all_reduce(
    tensor: Tensor,
    op: Any = SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Reduces a tensor over a group, in place; all ranks get the same bits."""
    issued, size = clock(), bytes_of(tensor)
    call = call_of(logs.ALL_REDUCE, group, backend, tensor, size)
    is_plain_sum = is_plain(tensor.dtype, op) and not tensor.requires_grad
    if call.reaches_cpu and tensor.is_cpu and is_plain_sum and is_dense(tensor):
        return start(call, (tensor, op), (), async_op, issued, size, op)
    carriers = Carriers(call)
    carried = carriers.in_place(tensor)
    terms, _, plain_op, after = plain([carried], carried, op, len(call.ranks))
    args, after = (terms[0], plain_op), [*after, *carriers.after]
    return start(call, args, after, async_op, issued, size, words_of(op))


@in_normal_mode
def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Reduces a tensor over a group into that of rank ``dst``; the others keep theirs."""
    issued, size = clock(), bytes_of(tensor)
    call = call_of(logs.REDUCE, group, backend, tensor, size)
    require_members(call.ranks, dst)
    require_own_memory(tensor)
    is_root, is_sum = call.group.world.rank == dst, is_plain(tensor.dtype, op)
    carriers = Carriers(call)
    carried = carriers.in_place(tensor) if is_root else carriers.source(tensor)
    if not is_root:  # a backend may leave any numbers there
        carried = carried.clone()
    terms, _, plain_op, after = plain([carried], carried, op, len(call.ranks))
    args, after = (terms[0], dst, plain_op), [*after, *carriers.after]
    agreed = _sum_at(dst) if is_sum else (dst, words_of(op))
    return start(call, args, after, async_op, issued, size, agreed)


@functools.cache
def _sum_at(root: int) -> tuple[int, Any]:
    # The same object at every call, which the check compares at once.
    return root, SUM


@in_normal_mode
def broadcast(
    tensor: Tensor,
    src: int,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Fills a tensor with that of rank ``src``."""
    issued, size = clock(), bytes_of(tensor)
    call = call_of(logs.BROADCAST, group, backend, tensor, size)
    require_members(call.ranks, src)
    require_own_memory(tensor)  # on the root, too: all ranks refuse the same
    carriers = Carriers(call)
    sends = call.group.world.rank == src
    carried = carriers.source(tensor) if sends else carriers.target(tensor)
    return start(call, (carried, src), carriers.after, async_op, issued, size, src)


@in_normal_mode
def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Fills one tensor for each rank with that rank's ``tensor``; sizes may differ."""
    issued, among = clock(), group_or_all(group)
    require_one_each(tensor_list, among, tensor)
    even = sum(part.nbytes for part in tensor_list) // among.size
    call = call_of(logs.ALL_GATHER, among, backend, tensor, even)
    carriers = Carriers(call)
    targets = [*map(carriers.target, tensor_list)]
    args = (targets, *apart([carriers.source(tensor)], targets))
    return start(call, args, carriers.after, async_op, issued, tensor.nbytes)


@in_normal_mode
def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Fills a tensor with those of all ranks, stacked or one after the other."""
    issued, size = clock(), bytes_of(input_tensor)
    call = call_of(logs.ALL_GATHER, group, backend, input_tensor, size)
    require_size(output_tensor, size * len(call.ranks), input_tensor)
    carriers = Carriers(call)
    target = carriers.target(output_tensor)
    [source] = apart([carriers.source(input_tensor)], [target])
    args = _parts(target, len(call.ranks)), source
    return start(call, args, carriers.after, async_op, issued, size)


@in_normal_mode
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Reduces one tensor for each rank into that rank's ``output``; sizes may differ."""
    issued, among = clock(), group_or_all(group)
    require_one_each(input_list, among, output)
    size = sum(part.nbytes for part in input_list)
    call = call_of(logs.REDUCE_SCATTER, among, backend, output, size)
    carriers = Carriers(call)
    target = carriers.target(output)
    sources = apart([*map(carriers.source, input_list)], [target])
    terms, carried, plain_op, after = plain(sources, target, op, among.size)
    args, after = (carried, terms, plain_op), [*after, *carriers.after]
    return start(call, args, after, async_op, issued, size, words_of(op))


@in_normal_mode
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Reduces a tensor, and leaves on each rank its equal part, in the order of ranks."""
    issued, size = clock(), bytes_of(input)
    bytes_of(output)
    call = call_of(logs.REDUCE_SCATTER, group, backend, output, size)
    num_ranks = len(call.ranks)
    require_size(input, output.nbytes * num_ranks, output)
    carriers = Carriers(call)
    target = carriers.target(output)
    sources = apart([carriers.source(input)], [target])
    terms, carried, plain_op, after = plain(sources, target, op, num_ranks)
    args, after = (carried, _parts(terms[0], num_ranks), plain_op), [*after, *carriers.after]
    return start(call, args, after, async_op, issued, size, words_of(op))


@in_normal_mode
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Sends one tensor to each rank, and fills one from each; sizes may differ."""
    issued, among = clock(), group_or_all(group)
    require_one_each(input_tensor_list, among)
    require_one_each(output_tensor_list, among, input_tensor_list[among.index])
    size = sum(part.nbytes for part in input_tensor_list)
    call = call_of(logs.ALL_TO_ALL, among, backend, input_tensor_list[0], UNEVEN)
    carriers = Carriers(call)
    targets = [*map(carriers.target, output_tensor_list)]
    args = targets, apart([*map(carriers.source, input_tensor_list)], targets)
    return start(call, args, carriers.after, async_op, issued, size)


@in_normal_mode
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """The same with rows of one tensor: equal parts, or those of the split sizes.

    A rank whose parts are equal may leave the sizes out where another one gives them.
    """
    issued, size = clock(), bytes_of(input)
    call = call_of(logs.ALL_TO_ALL, group, backend, input, UNEVEN)
    require_counts(output_split_sizes, input_split_sizes)
    if output_split_sizes or input_split_sizes:
        require_rows(output, input)
    else:
        require_size(output, size, input)
    counts = [
        _row_counts(tensor, sizes, len(call.ranks))
        for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes))
    ]
    carriers = Carriers(call)
    target = carriers.target(output)
    [source] = apart([carriers.source(input)], [target])
    args = tuple(_rows(tensor, own) for tensor, own in zip((target, source), counts, strict=True))
    return start(call, args, carriers.after, async_op, issued, size)


@in_normal_mode
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Fills one tensor for each rank, on rank ``dst``; sizes may differ."""
    issued, among = clock(), group_or_all(group)
    bytes_of(tensor)
    call = call_of(logs.GATHER, among, backend, tensor, UNEVEN)
    require_members(call.ranks, dst)
    carriers, results, none = Carriers(call), gather_list or (), [None] * among.size
    require_one_each(results, among, tensor, dst)
    filled = [*map(carriers.target, results)]
    [source] = apart([carriers.source(tensor)], filled)
    args = filled or none, at(call.ranks.index(dst), source, none)
    return start(call, args, carriers.after, async_op, issued, tensor.nbytes, dst)


@in_normal_mode
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group | None = None,
    async_op: bool = False,
    *,
    backend: Choice = None,
) -> Handle | None:
    """Fills the tensor of each rank with its one of rank ``src``; sizes may differ."""
    issued, among = clock(), group_or_all(group)
    bytes_of(tensor)
    call = call_of(logs.SCATTER, among, backend, tensor, UNEVEN)
    require_members(call.ranks, src)
    carriers, given, none = Carriers(call), scatter_list or (), [None] * among.size
    require_one_each(given, among, tensor, src)
    target = carriers.target(tensor)
    sources = apart([*map(carriers.source, given)], [target])
    args = at(call.ranks.index(src), target, none), sources or none
    return start(call, args, carriers.after, async_op, issued, tensor.nbytes, src)


def barrier(
    group: Group | None = None, async_op: bool = False, *, backend: Choice = None
) -> Handle | None:
    """Waits for all ranks of a group, or of the world."""
    issued = clock()
    call = call_of(logs.BARRIER_CALL, group, backend, _NOTHING, 0)
    return start(call, (), (), async_op, issued, 0)


def _parts(tensor: Tensor, num_ranks: int) -> list[Tensor]:
    # One part of a contiguous tensor for each rank, as views.
    return [*tensor.view(num_ranks, tensor.numel() // num_ranks).unbind(0)]


def _rows(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    ends = [0, *itertools.accumulate(counts)]
    return [tensor[begin:end] for begin, end in itertools.pairwise(ends)]


def _row_counts(tensor: Tensor, sizes: Sequence[int] | None, num_ranks: int) -> Sequence[int]:
    # Of each rank; CommError: the rows do not divide so.
    rows = len(tensor) if tensor.dim() else 1
    if not sizes:
        if rows % num_ranks:
            raise CommError(f"{rows} rows cannot be divided among {num_ranks} ranks; give sizes")
        return [rows // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != rows:
        raise CommError(f"split sizes {sizes} do not divide {rows} rows among {num_ranks} ranks")
    return sizes
