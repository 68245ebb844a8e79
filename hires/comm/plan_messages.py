"""Carries out what only plans have: messages on channels, and sums and gathers of many tensors.

plan's message    its channel, where the backend has streams | irecv, isend
many tensors      small ones as one, large ones where they lie

Where each rank needs a part of the sums, every rank names the same parts by member
(:mod:`hires.comm.coding`). With a codec their codes travel:

    terms of all ranks  --encode, all-to-all, decode-->  sum on its member, in fp32 or better
    sums                --encode, all-gather, decode-->  the same bits on all members
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor

from hires.comm import message_log as logs
from hires.comm.argument_checks import require_members
from hires.comm.backends.group_calls import Channels, StreamWaits
from hires.comm.calls import Carriers, start
from hires.comm.chain import RankChain
from hires.comm.coding import (
    Buffers,
    Parts,
    buffers,
    decode,
    divide,
    encode,
    equal_shares,
    joined,
    length,
)
from hires.comm.comm_world import CommWorld, Group, default_world, group_or_all, unlogged
from hires.comm.dispatch import Choice, call_of, channel_message
from hires.comm.handles import Handle, guard, waiting
from hires.comm.operations import (
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from hires.comm.point_to_point import irecv, isend
from hires.core.codecs import Codec
from hires.core.errors import CommError
from hires.plan.groups import ALONE_BYTES
from hires.plan.message_routes import Channel
from hires.plan.routes import CHANNEL, FLAT, OWN, Route


def post(
    kind: str,
    tensor: Tensor,
    peer: int,
    tag: int,
    group: Group | None = None,
    channel: int = 0,
    *,
    channels: Channels | None = None,
    backend: Choice = None,
) -> Handle:
    """Begins a plan's message, a ``send`` or a ``recv``; returns its handle.

    4-dim tensors travel as NHWC: a strip of rows of a channels-last map is sent as it lies. Both
    sides name the same ``tag`` and ``group``. On a backend with streams one of the plan's
    ``channels``, by its number, carries the message, with :func:`end_call`. Without a ``backend``
    the default one does.
    """
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    algorithm = backend.algorithm if isinstance(backend, Route) else ""
    among = group_or_all(group)
    if channel and channels is not None and algorithm in ("", CHANNEL):
        return _on_channel(kind, tensor, peer, tag, among, channels, channel)
    if algorithm == CHANNEL:  # in a rehearsal
        backend = Route(among.world.default)
    function = isend if kind == "send" else irecv
    return function(tensor, peer, among, tag, backend=backend)


def end_call(channels: Channels | None, world: CommWorld) -> None:
    """Begins what was posted on channels since the last call, one group call for each channel."""
    if channels is not None:
        guard(channels.end_call, "a group call", world)


def all_gather_stacked(tensor: Tensor, group: Group, *, backend: Choice = None) -> Tensor:
    """Returns the tensors of all ranks of a group, stacked in the order of its ranks."""
    output = tensor.new_empty((group.size, *tensor.shape))
    all_gather_into_tensor(output, tensor, group, backend=backend)
    return output


def all_reduce_coalesced(
    tensors: list[Tensor],
    group: Group,
    *,
    backend: Choice = None,
    codec: Codec | None = None,
    left: Sequence[Tensor] = (),
) -> None:
    """Sums dense tensors over a group, in place, those of one type together.

    With a codec they are flat, and each sum is coded twice: as its terms, and as the result. A
    codec that ``leaves`` numbers out codes terms alone; ``left`` are what it left of these before,
    which are added, and take what it leaves now.
    """
    if codec is not None and codec.leaves:
        _sum_of_gathered(tensors, left, group, backend, codec)
        return
    if codec is not None:

        def through(place: int, rows: list[list[Tensor]], width: int, route: Choice) -> None:
            terms = joined(rows, width, codec)
            _gather_codes(terms, _sum_of_codes(terms, group, codec, route), group, codec, route)
            for row, own in zip(terms, rows, strict=True):
                divide(row, own, codec)

        parts = equal_shares(tensors, group.size, codec.block)
        _carry_out(parts, group, backend, through, logs.ALL_REDUCE, codec)
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors if group.size > 1 else ():
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for bucket in by_type.values():
        issued, log = clock(), group.world.log
        with unlogged:  # the log keeps it as one operation
            way = _sum_bucket(bucket, group, backend)
        if log is not None:
            num_bytes = sum(tensor.nbytes for tensor in bucket)
            log.note_blocking(logs.ALL_REDUCE, way, num_bytes, issued)


def reduce_scatter_coalesced(
    parts: Parts,
    group: Group,
    *,
    backend: Choice = None,
    codec: Codec | None = None,
    left: Parts = (),
) -> None:
    """Sums tensors over a group in place: on each member its own parts, by its place in the group.

    Those of the other members keep their numbers. ``left`` is as in :func:`all_reduce_coalesced`.
    """
    lefts = buffers(left, codec) if codec is not None and codec.leaves else None

    def through(place: int, rows: list[list[Tensor]], width: int, route: Choice) -> None:
        sent = joined(rows, width, codec)
        if codec is None:
            sums = sent.new_empty(width)
            reduce_scatter_tensor(sums, sent, group=group, backend=route)
        else:
            sums = _sum_of_codes(sent, group, codec, route, lefts)
        divide(sums, rows[place], codec)

    _carry_out(parts, group, backend, through, logs.REDUCE_SCATTER, codec)


def all_gather_coalesced(parts: Parts, group: Group, *, backend: Choice = None) -> None:
    """Fills the parts of the other members with theirs."""

    def through(place: int, rows: list[list[Tensor]], width: int, route: Choice) -> None:
        gathered = joined(rows, width, None)
        all_gather_into_tensor(gathered, gathered[place].clone(), group, backend=route)
        for index, row in enumerate(gathered):
            if index != place:
                divide(row, rows[index], None)

    _carry_out(parts, group, backend, through, logs.ALL_GATHER, None)


def broadcast_coded(
    numbers: Tensor, src: int, group: Group, *, backend: Choice = None, codec: Codec
) -> None:
    """Fills flat numbers of all ranks, the root's too, with what the root's codes of them hold.

    Codes are made once, at the root: all ranks get the same bits. A route with segments decodes
    each while the next one travels (:mod:`hires.comm.chain`).
    """
    issued, is_root = clock(), group.world.rank == src
    codes = numbers.new_empty(0, dtype=torch.uint8)
    num_bytes = codec.num_bytes(len(numbers))
    call = call_of(logs.BROADCAST, group, backend, codes, num_bytes)
    require_members(call.ranks, src)
    args: tuple[Any, ...] = numbers, src, codec
    after: list[Callable[[], object]] = []
    if not isinstance(call.method, RankChain) or numbers.device.type not in call.staging.reaches:
        carriers, codes = Carriers(call), codes.new_empty(num_bytes)
        if is_root:
            encode(codec, numbers, codes)
        args = (carriers.source if is_root else carriers.target)(codes), src
        after = [*carriers.after, lambda: decode(codec, codes, numbers)]
    start(call, args, after, False, issued, num_bytes, (src, codec.called))


def open_channels(
    channels: Sequence[Channel], groups: dict[int, Group], device: torch.device, world: CommWorld
) -> Channels | None:
    """Returns the plan's communicators; None: the backend has no streams. All ranks call it.

    They and those of the groups are connected here: a later connection would make a rank wait
    inside a post, which the proof does not model.
    """
    if not world.has_streams:
        return None
    if device.type != "cpu" and world.streams is None:
        world.streams = StreamWaits(device, world.timeout_s)
    for number in sorted(groups):  # all ranks come to the groups in one order
        if groups[number].size > 1:
            first = functools.partial(
                world.backend.all_reduce,
                torch.zeros(1, device=device),
                group=groups[number].handles[world.default],
            )
            what, ranks = f"the first sum among ranks {groups[number].ranks}", groups[number].ranks
            waiting(first, what, world, ranks)
            if world.streams is not None:
                world.streams.add(what, tuple(ranks))
                finish_streams(world)
    finish = functools.partial(finish_streams, world)
    make = functools.partial(Channels, world.backend, channels, device, world.streams, finish)
    every = world.all_ranks.ranks
    opened: Channels = waiting(make, "the first messages on each channel", world, every)
    return opened


def finish_streams(world: CommWorld | None = None) -> None:
    """Returns when the device has completed all operations that its streams wait for.

    CommError: nothing ended for the longest wait, or the device reports an error. What is under way
    is aborted then, so that neither the device nor the end of this process waits for it.
    """
    world = world or default_world()
    streams = world.streams
    while streams is not None and (first := streams.oldest()) is not None:
        try:
            what, ranks, operation = first.what, first.ranks, first.operation
            waiting(streams.finish_oldest, what, world, ranks, operation=operation)
        except CommError:
            world.backend.abort()
            raise


def _sum_bucket(bucket: list[Tensor], group: Group, backend: Choice) -> int:
    # Large tensors are summed where they lie, all at once, and the small ones are copied into one
    # flat message; in all they send the same bytes as one message would. All ranks give the same
    # sizes, so they choose alike.
    #
    #     1 MiB   2 KiB   3 MiB   1 KiB        in place:  1 MiB | 3 MiB
    #                                          one copy:  2 KiB + 1 KiB
    route = _route(backend, group)
    staged = group.world.staging(route.backend).of(bucket)
    if staged is not None:  # as one message: its buffer is a copy already
        bucket = [staged.fetch().host]
    is_flat = route.algorithm in (FLAT, OWN)
    own = Route(route.backend) if is_flat else route
    sum_up = functools.partial(all_reduce, group=group, backend=own)
    small = [tensor for tensor in bucket if tensor.nbytes < ALONE_BYTES]
    large = (tensor for tensor in bucket if tensor.nbytes >= ALONE_BYTES)
    handles = [sum_up(tensor, async_op=True) for tensor in large]
    if small:
        together = torch.cat([tensor.view(-1) for tensor in small])
        sum_up(together)
        parts = torch.split(together, [tensor.numel() for tensor in small])
        for tensor, part in zip(small, parts, strict=True):
            tensor.view(-1).copy_(part)
    for handle in handles:
        assert handle is not None
        handle.wait()
    if staged is not None:  # after an error a library may still use the buffer
        staged.put()
    return logs.way(*(Route(route.backend, FLAT) if is_flat else route), staged is not None)


def _on_channel(
    kind: str,
    tensor: Tensor,
    peer: int,
    tag: int,
    group: Group,
    channels: Channels,
    channel: int,
) -> Handle:
    world, issued = group.world, clock()
    if kind == "send":
        tensor = tensor.contiguous()
    assert tensor.is_contiguous(), "a message needs a dense buffer"
    call = channel_message(kind, peer, group)
    unit = guard(lambda: channels.post(kind, tensor, peer, channel), call.what, world)
    handle = Handle(unit, call, (), tag)
    if world.log is not None:
        handle.keep_in(world.log, tensor.nbytes, issued)
    return handle


def _carry_out(
    parts: Parts,
    group: Group,
    backend: Choice,
    through: Callable[[int, list[list[Tensor]], int, Choice], None],
    operation: int,
    codec: Codec | None,
) -> None:
    if group.size == 1 or not any(tensor.numel() for own in parts for tensor in own):
        return
    issued, log, route = clock(), group.world.log, _route(backend, group)
    with unlogged:  # it is one operation, whatever it is made of
        for rows, width in buffers(parts, codec):
            through(group.index, rows, width, route)
    if log is not None:
        sizes = [sum(length(tensor, codec) for tensor in own) for own in parts]
        elements = max(sizes) if operation == logs.ALL_GATHER else sum(sizes)
        item = next(tensor.element_size() for own in parts for tensor in own)
        num_bytes = codec.num_bytes(elements) if codec is not None else elements * item
        log.note_blocking(operation, logs.way(*route), num_bytes, issued)


def _sum_of_gathered(
    tensors: list[Tensor], left: Sequence[Tensor], group: Group, backend: Choice, codec: Codec
) -> None:
    lefts = buffers([left], codec)

    def through(place: int, rows: list[list[Tensor]], width: int, route: Choice) -> None:
        terms = joined(rows, width, codec)
        [codes] = _codes_of(terms, codec, lefts)
        gathered, total = all_gather_stacked(codes, group, backend=route), terms.new_zeros(width)
        for code in gathered:
            total.add_(decode(codec, code, terms[0]))
        divide(total, rows[0], codec)

    _carry_out([tensors], group, backend, through, logs.ALL_GATHER, codec)


def _codes_of(terms: Tensor, codec: Codec, lefts: Buffers | None) -> Tensor:
    """Returns the codes of rows, to which is added what was left of them before."""
    left, width = next(lefts) if lefts is not None else ([], terms.shape[1])
    if left:
        terms.add_(joined(left, width, codec))
    codes = terms.new_empty((len(terms), codec.num_bytes(width)), dtype=torch.uint8)
    for row, code in zip(terms, codes, strict=True):
        encode(codec, row, code)
    for row, code, own in zip(terms, codes, left, strict=False):
        divide(row - decode(codec, code, torch.empty_like(row)), own, codec)
    return codes


def _sum_of_codes(
    terms: Tensor, group: Group, codec: Codec, route: Choice, lefts: Buffers | None = None
) -> Tensor:
    """Returns the sum of what all members have in their row of ``terms`` for this one."""
    codes = _codes_of(terms, codec, lefts)
    arrived = torch.empty_like(codes)
    all_to_all_single(arrived, codes, group=group, backend=route)
    for row, code in zip(terms, arrived, strict=True):
        decode(codec, code, row)
    return terms.sum(0)


def _gather_codes(gathered: Tensor, own: Tensor, group: Group, codec: Codec, route: Choice) -> None:
    """Fills rows with what the members have, as codes of it: the same bits on all of them."""
    codes = all_gather_stacked(encode(codec, own), group, backend=route)
    for row, code in zip(gathered, codes, strict=True):
        decode(codec, code, row)


def _route(backend: Choice, group: Group) -> Route:
    return backend if isinstance(backend, Route) else Route(backend or group.world.default)
