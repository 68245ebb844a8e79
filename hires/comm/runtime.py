"""Sends a plan's messages, and gathers and sums tensors of a group.

plan's message    its channel, where the backend has streams | irecv, isend
many tensors      small ones as one, large ones where they lie
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter as clock

import torch
from torch import Tensor

from hires.comm import message_log as logs
from hires.comm.dispatch import plan_message
from hires.comm.guarded_waits import guard
from hires.comm.handles import Handle
from hires.comm.operation_routes import Choice
from hires.comm.operations import all_gather_into_tensor, all_reduce
from hires.comm.point_to_point import irecv, isend
from hires.comm.transport import Group, transport, unlogged
from hires.plan.groups import ALONE_BYTES
from hires.plan.routes import CHANNEL, FLAT, OWN, Route


def post(
    kind: str,
    tensor: Tensor,
    peer: int,
    tag: int,
    group: Group | None = None,
    channel: int = 0,
    *,
    backend: Choice = None,
) -> Handle:
    """Begins a plan's message, a ``send`` or a ``recv``; returns its handle.

    4-dim tensors travel as NHWC: a strip of rows of a channels-last map is sent as it lies. Both
    sides name the same ``tag`` and ``group``. On a backend with streams that of its ``channel``
    carries the message, with :func:`end_call`. Without a ``backend`` the default one does.
    """
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    algorithm = backend.algorithm if isinstance(backend, Route) else ""
    if channel and transport.channels is not None and algorithm in ("", CHANNEL):
        return _on_channel(kind, tensor, peer, tag, group, channel)
    if algorithm == CHANNEL:  # in a rehearsal
        backend = Route(transport.default)
    function = isend if kind == "send" else irecv
    return function(tensor, peer, group, tag, backend=backend)


def end_call() -> None:
    """Begins what was posted on channels since the last call, one group call for each channel."""
    if transport.channels is not None:
        guard(transport.channels.end_call, "a group call")


def all_gather_stacked(tensor: Tensor, group: Group, *, backend: Choice = None) -> Tensor:
    """Returns the tensors of all ranks of a group, stacked in the order of its ranks."""
    output = tensor.new_empty((group.size, *tensor.shape))
    all_gather_into_tensor(output, tensor, group, backend=backend)
    return output


def all_reduce_coalesced(tensors: list[Tensor], group: Group, *, backend: Choice = None) -> None:
    """Sums dense tensors over a group, in place, those of one type together."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors if group.size > 1 else ():
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for bucket in by_type.values():
        issued, log = clock(), transport.log
        with unlogged:  # the log keeps it as one operation
            way = _sum_bucket(bucket, group, backend)
        if log is not None:
            num_bytes = sum(tensor.nbytes for tensor in bucket)
            log.note_blocking(logs.ALL_REDUCE, way, num_bytes, issued)


def _sum_bucket(bucket: list[Tensor], group: Group, backend: Choice) -> int:
    # Large tensors are summed where they lie, all at once, and the small ones are copied into one
    # flat message; in all they send the same bytes as one message would. All ranks give the same
    # sizes, so they choose alike.
    #
    #     1 MiB   2 KiB   3 MiB   1 KiB        in place:  1 MiB | 3 MiB
    #                                          one copy:  2 KiB + 1 KiB
    route = backend if isinstance(backend, Route) else Route(backend or transport.default)
    staged = transport.staging(route.backend).of(bucket)
    if staged is not None:  # as one message: its buffer is a copy already
        bucket = [staged.fetch().host]
    flat = route.algorithm in (FLAT, OWN)
    route = Route(route.backend, FLAT) if flat else route
    _sum_flat(bucket, group, Route(route.backend) if flat else route)
    if staged is not None:  # after an error a library may still use the buffer
        staged.put()
    return logs.way(*route, staged is not None)


def _sum_flat(bucket: list[Tensor], group: Group, backend: Choice) -> None:
    large = [tensor for tensor in bucket if tensor.nbytes >= ALONE_BYTES]
    small = [tensor for tensor in bucket if tensor.nbytes < ALONE_BYTES]
    sum_up = functools.partial(all_reduce, group=group, backend=backend)
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


def _on_channel(
    kind: str, tensor: Tensor, peer: int, tag: int, group: Group | None, channel: int
) -> Handle:
    channels, issued = transport.channels, clock()
    assert channels is not None
    if kind == "send":
        tensor = tensor.contiguous()
    assert tensor.is_contiguous(), "a message needs a dense buffer"
    call = plan_message(kind, peer, group, CHANNEL, transport.default, "")
    unit = guard(lambda: channels.post(kind, tensor, peer, channel), call.what)
    work = _Wait(functools.partial(channels.wait, unit))
    return _begun(Handle(work, call, [tensor], (), tag), tensor, issued)


class _Wait:
    # A work that is complete when a function returns.
    def __init__(self, finish: Callable[[], object]) -> None:
        self.wait = finish


def _begun(handle: Handle, tensor: Tensor, issued: float) -> Handle:
    log = transport.log
    if log is not None:
        handle.keep_in(log, tensor.nbytes, issued)
    return handle
