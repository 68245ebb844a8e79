"""The operations through which every message goes: point to point, sums, gathers, barriers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm import shared
from hires.comm.membership import Group, guard, patient_group, transport, waiting
from hires.comm.rehearsal import SilentMemory
from hires.comm.shared import SharedMemory
from hires.core.ranks.timeline import COLLECTIVE, HALO
from hires.plan.groups import ALONE_BYTES

DIRECT_BYTES = shared.GATHER_BYTES
"""Up to this size a gather goes point to point: a third of the latency of gloo's collective."""


@dataclass
class Handle:
    """An operation under way."""

    finish: Callable[[], Any] | None  # returns when it is complete; None: it is complete already
    what: str
    group: Group | None = None  # a wait inside an action is recorded for it
    peer: int = -1
    tag: int = -1
    ranks: tuple[int, ...] = ()  # all members of a collective
    label: str = ""  # of the wait in the time line, where ``what`` names all ranks

    def wait(self, kind: str = HALO) -> Any:
        """Returns what ``finish`` does; CommError: the other side died, or is late.

        ``kind``: what the timeline calls the wait.
        """
        if self.finish is None:
            return None
        recorder = self.group.recorder if self.group is not None else None
        begin = recorder.clock.now() if recorder is not None else None
        result = waiting(self.finish, self.what, self.peer, self.tag, self.ranks)
        if recorder is not None and recorder.action:
            recorder.note(kind, begin, self.label or self.what)
        return result


def isend(
    tensor: Tensor, peer: int, tag: int, group: Group | None = None, channel: int = 0
) -> Handle:
    """Begins to send a tensor, which must stay unchanged until the handle is done.

    Both sides name the same ``tag``, and the same ``group`` of ranks in lockstep: small messages
    between these go through shared memory where there is some, in order and without a tag. Where
    the backend has streams, that of its ``channel`` carries the message, with :func:`end_call`.
    """
    if channel and transport.channels is not None:
        return _on_channel("send", _nhwc(tensor).contiguous(), peer, tag, group, channel)
    memory, what, sent = _memory_for(tensor, group), f"a send to rank {peer}", _nhwc(tensor)
    if group is not None and memory is not None:
        index = group.ranks.index(peer)
        waiting(lambda: memory.send(sent, index), what, peer, tag)
        return Handle(None, what)
    staged = transport.staging.of([sent])
    [sent] = staged.fetch().parts if staged is not None else [sent.contiguous()]
    work = guard(lambda: transport.backend.isend(sent, peer, tag=tag), what)
    finish = work.wait if staged is None else _after(work.wait, staged.drop)
    return Handle(finish, what, group, peer, tag)


def irecv(
    tensor: Tensor, peer: int, tag: int, group: Group | None = None, channel: int = 0
) -> Handle:
    """Begins to fill a dense tensor (channels-last if it has 4 dims) from another rank."""
    if channel and transport.channels is not None:
        return _on_channel("recv", _nhwc(tensor), peer, tag, group, channel)
    memory, what, buffer = _memory_for(tensor, group), f"a receive from rank {peer}", _nhwc(tensor)
    if group is not None and memory is not None:
        finish = memory.expect(buffer, group.ranks.index(peer))
    else:
        assert buffer.is_contiguous(), "a receive needs a dense buffer"
        staged = transport.staging.of([buffer])
        [filled] = staged.parts if staged is not None else [buffer]
        finish = guard(lambda: transport.backend.irecv(filled, peer, tag=tag), what).wait
        finish = finish if staged is None else _after(finish, staged.put)
    return Handle(finish, what, group, peer, tag)


def end_call() -> None:
    """Sets out what was sent and received on channels since the last call."""
    if transport.channels is not None:
        guard(transport.channels.end_call, "a group call")


def all_reduce(tensor: Tensor, group: Group, wait: bool = True) -> Handle:
    """Sums a dense tensor over a group, in place; without ``wait`` it may still be under way."""
    what, among = f"an all-reduce among ranks {group.ranks}", group.process_group
    if group.size == 1:
        return Handle(None, what)
    staged = transport.staging.of([tensor])
    [summed] = staged.fetch().parts if staged is not None else [tensor]
    work = guard(lambda: transport.backend.all_reduce(summed, group=among, async_op=True), what)
    finish = work.wait if staged is None else _after(work.wait, staged.put)
    noted, ranks = group if wait else None, tuple(group.ranks)
    handle = Handle(finish, what, noted, ranks=ranks, label="all-reduce")
    if wait:
        handle.wait(COLLECTIVE)
    return handle


def all_reduce_coalesced(tensors: list[Tensor], group: Group) -> None:
    """Sums dense tensors over a group, in place, those of one type together."""
    # Ranks that read each other's memory sum them as one message. Others sum large tensors where
    # they lie, all at once, and copy the small ones into one flat message; in all they send the
    # same bytes as one message would. All ranks give the same sizes, so they choose alike.
    #
    #     1 MiB   2 KiB   3 MiB   1 KiB        in place:  1 MiB | 3 MiB
    #                                          one copy:  2 KiB + 1 KiB
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors if group.size > 1 else ():
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for bucket in by_type.values():
        staged = transport.staging.of(bucket)
        if staged is not None:  # as one message: its buffer is a copy already
            all_reduce_coalesced([staged.fetch().host], group)
            staged.put()
        elif group.peers is not None:
            what = f"a sum among ranks {group.ranks}"
            waiting(functools.partial(group.peers.sum, bucket), what, -1, -1, tuple(group.ranks))
        else:
            large = [tensor for tensor in bucket if tensor.nbytes >= ALONE_BYTES]
            small = [tensor for tensor in bucket if tensor.nbytes < ALONE_BYTES]
            handles = [all_reduce(tensor, group, wait=False) for tensor in large]
            if small:
                together = torch.cat([tensor.view(-1) for tensor in small])
                all_reduce(together, group)
                parts = torch.split(together, [tensor.numel() for tensor in small])
                for tensor, part in zip(small, parts, strict=True):
                    tensor.view(-1).copy_(part)
            for handle in handles:
                handle.wait()


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Returns the tensors of all ranks of a group, stacked in the order of its ranks."""
    gather = functools.partial(_gather, tensor, group)
    what = f"an all-gather among ranks {group.ranks}"
    handle = Handle(gather, what, group, ranks=tuple(group.ranks), label="all-gather")
    gathered: Tensor = handle.wait(COLLECTIVE)
    return gathered


def _gather(tensor: Tensor, group: Group) -> Tensor:
    staged = transport.staging.of([tensor])
    if staged is not None:
        gathered = _gather(staged.fetch().parts[0], group).to(tensor.device)
        staged.drop()
        return gathered
    small = tensor.nbytes <= DIRECT_BYTES and transport.channels is None
    if group.shared is not None and small:
        return group.shared.gather(tensor)
    gathered = tensor.new_empty((group.size, *tensor.shape))
    if group.size > 1 and not small:
        parts = list(gathered.unbind(0))
        transport.backend.all_gather(parts, tensor.contiguous(), group=group.process_group)
        return gathered
    gathered[group.index] = tensor
    others = [(i, rank) for i, rank in enumerate(group.ranks) if i != group.index]
    # Receives first: a blocking send of every rank to every other would wait for each other.
    handles = [irecv(gathered[i].view(-1), rank, group.tag) for i, rank in others]
    handles += [isend(gathered[group.index].view(-1), rank, group.tag) for _, rank in others]
    for handle in handles:
        handle.wait()
    return gathered


def _after(finish: Callable[[], Any], then: Callable[[], None]) -> Callable[[], None]:
    def finish_both() -> None:
        finish()
        then()

    return finish_both


def barrier() -> None:
    """Waits for all ranks of the world."""
    waiting(transport.backend.barrier, "a barrier of all ranks")


def max_all(number: int, patient: bool = False) -> int:
    """Returns the largest number of all ranks of the world; also a barrier.

    ``patient``: the others may take as long as they need to read or write files.
    """
    largest, group = torch.tensor([number]), patient_group() if patient else None
    reduce = functools.partial(transport.backend.all_reduce, largest, dist.ReduceOp.MAX, group)
    waiting(reduce, "an agreement of all ranks")
    return int(largest)


def _on_channel(
    kind: str, tensor: Tensor, peer: int, tag: int, group: Group | None, channel: int
) -> Handle:
    channels, what = transport.channels, f"a {'send to' if kind == 'send' else 'receive from'} rank"
    assert channels is not None
    assert tensor.is_contiguous(), "a message needs a dense buffer"
    unit = guard(lambda: channels.post(kind, tensor, peer, channel), f"{what} {peer}")
    return Handle(functools.partial(channels.wait, unit), f"{what} {peer}", group, peer, tag)


def _memory_for(tensor: Tensor, group: Group | None) -> SharedMemory | SilentMemory | None:
    # A function of size and group only, so that both sides choose alike.
    memory = group.shared if group is not None else None
    return memory if memory is not None and tensor.nbytes <= memory.mail_bytes else None


def _nhwc(tensor: Tensor) -> Tensor:
    # 4-dim tensors travel as NHWC: a strip of rows of a channels-last map is sent as it lies.
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor
