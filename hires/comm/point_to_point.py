"""Sends and receives with the names, arguments and meaning of torch.distributed.

Ranks are ranks of the world. ``backend`` is that of :mod:`hires.comm.operations`. Errors are
CommErrors.

Source:
    https://pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hires.comm import message_log as logs
from hires.comm.argument_checks import bytes_of, message_bytes, require_tag
from hires.comm.backends.backend import Post
from hires.comm.calls import Carriers, in_normal_mode, needs_none
from hires.comm.comm_world import MOST_CALLS, Group, activity
from hires.comm.dispatch import Choice, Dispatch, call_of
from hires.comm.handles import FAILURES, Handle, failure
from hires.core.errors import CommError
from hires.plan.traffic import CALLED


@in_normal_mode
def isend(
    tensor: Tensor,
    dst: int,
    group: Group | None = None,
    tag: int = 0,
    *,
    backend: Choice = None,
) -> Handle:
    """Begins to send a tensor, which must stay unchanged until the handle is done.

    Messages of one group, tag and backend between two ranks keep their order.
    """
    issued = clock()
    call = call_of(logs.SEND, group, backend, tensor, message_bytes(tensor, tag), dst)
    return _start_message(call, tensor, tag, issued)


@in_normal_mode
def irecv(
    tensor: Tensor,
    src: int,
    group: Group | None = None,
    tag: int = 0,
    *,
    backend: Choice = None,
) -> Handle:
    """Begins to fill a tensor with a message of its size; the sender is always named."""
    issued = clock()
    call = call_of(logs.RECV, group, backend, tensor, message_bytes(tensor, tag), src)
    return _start_message(call, tensor, tag, issued)


@in_normal_mode
def send(
    tensor: Tensor,
    dst: int,
    group: Group | None = None,
    tag: int = 0,
    *,
    backend: Choice = None,
) -> None:
    """Sends a tensor; returns when it may be changed."""
    issued = clock()
    call = call_of(logs.SEND, group, backend, tensor, message_bytes(tensor, tag), dst)
    _carry_message(call, tensor, tag, issued)


@in_normal_mode
def recv(
    tensor: Tensor,
    src: int,
    group: Group | None = None,
    tag: int = 0,
    *,
    backend: Choice = None,
) -> int:
    """Fills a tensor with a message; returns its sender."""
    issued = clock()
    call = call_of(logs.RECV, group, backend, tensor, message_bytes(tensor, tag), src)
    _carry_message(call, tensor, tag, issued)
    return src


class P2POp(NamedTuple):
    """One side of a message: ``op`` is :func:`isend` or :func:`irecv`, also those of torch."""

    op: Callable[..., Handle]
    tensor: Tensor
    peer: int
    group: Group | None = None
    tag: int = 0
    backend: Choice = None


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Handle]:
    """Begins several messages; returns their handles in the order of the list."""
    for one in p2p_op_list:
        if not isinstance(one, P2POp):
            raise CommError(f"expected a hires.comm.P2POp, got {one!r:.60}")
        require_tag(one.tag)
    return start_posts(p2p_op_list) if p2p_op_list else []


@in_normal_mode
def start_posts(p2p_op_list: Sequence[P2POp]) -> list[Handle]:
    """The same with any tags, also those of messages of hires itself."""
    issued = clock()
    posts = [(_call_of(one), one.tensor, one.tag) for one in p2p_op_list]
    return _start_batch(posts, issued) if len(posts) > 1 else [_start_message(*posts[0], issued)]


def _call_of(one: P2POp) -> Dispatch:
    if one.op not in (isend, irecv, dist.isend, dist.irecv):
        raise CommError(f"a P2POp begins a message: give isend or irecv, not {one.op!r:.60}")
    operation = logs.RECV if one.op in (irecv, dist.irecv) else logs.SEND
    return call_of(operation, one.group, one.backend, one.tensor, bytes_of(one.tensor), one.peer)


def _start_message(call: Dispatch, tensor: Tensor, tag: int, issued: float) -> Handle:
    """Begins a send or receive; returns its handle."""
    carried, after, number = _prepared(call, tensor, tag)
    try:
        work = call.method(carried, call.peer, group=call.handle, tag=tag)
    except FAILURES as error:
        raise failure(call.what, error, call.group.world, call.backend, number) from error
    return _handle(work, call, tensor, tag, after, number, issued)


def _carry_message(call: Dispatch, tensor: Tensor, tag: int, issued: float) -> None:
    """Sends or receives a tensor; as :func:`_start_message` and a wait, in half of the time."""
    carried, after, number = _prepared(call, tensor, tag)
    world, complete = call.group.world, call.complete
    outer = activity.begin(call.what, call.peer, tag, (), number, CALLED[call.operation])
    try:
        if complete is not None:
            complete(carried, call.peer, call.handle, tag)
        else:
            call.method(carried, call.peer, group=call.handle, tag=tag).wait()
        for one in after:
            one()
    except FAILURES as error:
        raise failure(call.what, error, world, call.backend, number) from error
    finally:
        activity.end(outer)
    if world.log is not None:
        world.log.note_blocking(call.operation, call.way, tensor.nbytes, issued)


def _start_batch(posts: Sequence[tuple[Dispatch, Tensor, int]], issued: float) -> list[Handle]:
    """Begins sends and receives, each with its tag; returns their handles.

    Those of one group and backend begin together: one by one, two ranks that both receive first
    would wait for each other on a backend of streams.
    """
    batches: dict[tuple[int, str, int, str], list[int]] = {}
    for at, (call, tensor, _) in enumerate(posts):
        key = id(call.group.world), call.backend, id(call.handle), tensor.device.type
        batches.setdefault(key, []).append(at)
    handles: dict[int, Handle] = {}
    for places in batches.values():
        sides, ends = [], []
        for at in places:
            call, tensor, tag = posts[at]
            carried, after, number = _prepared(call, tensor, tag)
            sends = call.operation == logs.SEND
            sides.append(Post(sends, carried, call.peer, call.handle, tag))
            ends.append((call, tensor, tag, after, number))
        call, number = ends[0][0], ends[0][4]
        name, world = call.backend, call.group.world
        try:
            works = world.backends[name].begin_together(sides)
        except FAILURES as error:
            raise failure(call.what, error, world, name, number) from error
        for at, work, (call, tensor, tag, after, number) in zip(places, works, ends, strict=True):
            handles[at] = _handle(work, call, tensor, tag, after, number, issued)
    return [handles[at] for at in range(len(posts))]


def _handle(
    work: Any,
    call: Dispatch,
    tensor: Tensor,
    tag: int,
    after: Sequence[Callable[[], Any]],
    number: int,
    issued: float,
) -> Handle:
    handle = Handle(work, call, after, tag, number)
    log = call.group.world.log
    if log is not None:
        handle.keep_in(log, tensor.nbytes, issued)
    return handle


def _prepared(
    call: Dispatch, tensor: Tensor, tag: int
) -> tuple[Tensor, Sequence[Callable[[], Any]], int]:
    if needs_none(call, tensor):
        return tensor, (), _note_message(call, tag)
    carriers = Carriers(call)
    sends = call.operation == logs.SEND
    carried = carriers.source(tensor) if sends else carriers.target(tensor)
    return carried, carriers.after, _note_message(call, tag)


def _note_message(call: Dispatch, tag: int) -> int:
    check = call.group.world.check
    if check is None or call.facts is None:
        return -1
    channel = call.channels.get(tag)
    if channel is None:
        ends = call.group.world.rank, call.peer
        source, target = ends if call.operation == logs.SEND else ends[::-1]
        words = f"messages {source} to {target}, tag {tag}, in {call.group.name}"
        # The check continues the count of a channel that it returns again.
        channel = check.ring.message_channel(f"{words} over {call.backend}", ends)
        if channel is None:
            return -1
        if len(call.channels) >= MOST_CALLS:
            call.channels.clear()
        call.channels[tag] = channel
    return check.note(channel, call.facts)
