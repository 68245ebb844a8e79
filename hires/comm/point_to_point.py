"""Sends and receives with the names, arguments and meaning of torch.distributed.

Ranks are ranks of the world. ``backend`` is that of :mod:`hires.comm.operations`. Errors are
CommErrors.

Source:
    https://pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from hires.comm import message_log as logs
from hires.comm.argument_checks import bytes_of, message_bytes, require_tag
from hires.comm.calls import carry_message, start_batch, start_message
from hires.comm.carriers import in_normal_mode
from hires.comm.comm_world import Group
from hires.comm.dispatch import Choice, Dispatch, call_of
from hires.comm.handles import Handle
from hires.core.errors import CommError


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
    return start_message(call, tensor, tag, issued)


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
    return start_message(call, tensor, tag, issued)


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
    carry_message(call, tensor, tag, issued)


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
    carry_message(call, tensor, tag, issued)
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
    return start_batch(posts, issued) if len(posts) > 1 else [start_message(*posts[0], issued)]


def _call_of(one: P2POp) -> Dispatch:
    if one.op not in (isend, irecv, dist.isend, dist.irecv):
        raise CommError(f"a P2POp begins a message: give isend or irecv, not {one.op!r:.60}")
    operation = logs.RECV if one.op in (irecv, dist.irecv) else logs.SEND
    return call_of(operation, one.group, one.backend, one.tensor, bytes_of(one.tensor), one.peer)
