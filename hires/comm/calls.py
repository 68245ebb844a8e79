"""Carries out operations and messages by their dispatch; notes them in the log and the check.

Tensors that the backend does not reach, or that are not contiguous, are carried by others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hires.comm import message_log as logs
from hires.comm.backends.backend import Post
from hires.comm.carriers import Carriers, needs_none
from hires.comm.comm_world import MOST_CALLS, activity, unlogged
from hires.comm.dispatch import Dispatch
from hires.comm.guarded_waits import FAILURES, failure
from hires.comm.handles import Handle
from hires.core.ranks.timeline import COLLECTIVE
from hires.plan.traffic import CALLED


def _note(call: Dispatch, agreed: Any) -> int:
    # Keeps a collective among the rank's calls; -1: none are kept, or it has no other rank.
    check = call.group.world.check
    if check is None or call.channel is None or call.facts is None:
        return -1
    return check.note(call.channel, call.facts, agreed)


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


def start(
    call: Dispatch,
    args: Sequence[Any],
    after: Sequence[Callable[[], Any]],
    async_op: bool,
    issued: float,
    num_bytes: int,
    agreed: Any = None,
) -> Handle | None:
    """Carries out a collective; returns its handle with ``async_op``, else None when complete.

    ``agreed``: its root or reduction, which is the same on all ranks.
    """
    number, world = _note(call, agreed), call.group.world
    log = world.log if len(call.ranks) > 1 and not unlogged.on else None
    if async_op:
        try:
            work = call.method(*args, group=call.handle, async_op=True)
        except FAILURES as error:
            raise failure(call.what, error, world, call.backend, number) from error
        handle = Handle(work, call, after, number=number)
        if log is not None:
            handle.keep_in(log, num_bytes, issued)
        return handle
    recorder = call.group.recorder
    begin = recorder.clock.now() if recorder is not None else None
    operation = CALLED[call.operation]
    outer = activity.begin(call.what, -1, -1, call.ranks, number, operation)
    try:
        call.method(*args, group=call.handle)
        for one in after:
            one()
    except FAILURES as error:
        raise failure(call.what, error, world, call.backend, number) from error
    finally:
        activity.end(outer)
    if log is not None:
        log.note_blocking(call.operation, call.way, num_bytes, issued)
    if world.streams is not None:
        world.streams.add(call.what, call.ranks, operation)
    if recorder is not None and recorder.action:
        recorder.note(COLLECTIVE, begin, call.label)
    return None


def start_message(call: Dispatch, tensor: Tensor, tag: int, issued: float) -> Handle:
    """Begins a send or receive; returns its handle."""
    carried, after, number = _prepared(call, tensor, tag)
    try:
        work = call.method(carried, call.peer, group=call.handle, tag=tag)
    except FAILURES as error:
        raise failure(call.what, error, call.group.world, call.backend, number) from error
    return _handle(work, call, tensor, tag, after, number, issued)


def carry_message(call: Dispatch, tensor: Tensor, tag: int, issued: float) -> None:
    """Sends or receives a tensor; as :func:`start_message` and a wait, in half of the time."""
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


def start_batch(posts: Sequence[tuple[Dispatch, Tensor, int]], issued: float) -> list[Handle]:
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
