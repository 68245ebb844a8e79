"""The thin layer over ``torch.distributed`` through which every message goes.

Ranks are always ranks of the world; a group knows which ones it holds. A failure names the
operation and the other side.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm import shared
from hires.comm.attach import PeerMemory
from hires.comm.rehearsal import SilentMemory, SilentPeers, SilentWire
from hires.comm.shared import SharedMemory
from hires.core.doing import Doing
from hires.core.errors import CommError
from hires.core.network import interface_towards
from hires.core.timeline import COLLECTIVE, HALO, Recorder
from hires.core.world import World

DIRECT_BYTES = shared.GATHER_BYTES
"""Up to this size a gather goes point to point: a third of the latency of gloo's collective."""
Told = tuple[()] | tuple[int, int] | tuple[int, int, tuple[int, ...]]
"""Other rank and tag of a message, or -1 and the ranks of a collective."""
GATHER_TAG = 2**31 - 1024
"""Tags from here on belong to direct gathers; the plan's are far below."""
PATH_BYTES = 4096
"""Room for the name of a file."""
_INTERFACE = "GLOO_SOCKET_IFNAME"

PATIENCE_S = 3600.0
"""Longest wait for a rank that reads or writes a large file."""

# Set once by start(), like the process groups of torch.distributed themselves.
_wire: Any = dist
"""What carries the messages: torch.distributed, or in a rehearsal nothing."""
_one_machine = False
_timeout_s = 0.0

doing = Doing()
"""What this rank waits in, for whoever finds that it does not move."""


class Handle:
    """An operation under way."""

    def __init__(
        self,
        finish: Callable[[], Any] | None,
        what: str,
        group: Group | None = None,
        told: Told = (),
    ) -> None:
        """``finish`` returns when it is complete; None: it is complete already.

        A wait inside an action is noted as one of the group's; ``told`` is what ``doing`` is told
        about the other side.
        """
        self._finish = finish
        self._what = what
        self._told = told
        self._recorder = group.recorder if group is not None else None

    def wait(self) -> None:
        """Returns when the operation is complete.

        Raises:
            CommError: the other side died or did not answer within ``comm.timeout_s``.
        """
        if self._finish is None:
            return
        begin_s = time.perf_counter()
        _waiting(self._finish, self._what, *self._told)
        _note(self._recorder, HALO, begin_s, self._what)


@dataclass
class Group:
    """Some ranks, in ascending order, that call collectives together."""

    ranks: list[int]
    index: int
    """Position of this rank among them."""
    process_group: Any
    """The transport's own handle; None for a group of one."""
    tag: int
    """Tag of its direct gathers."""
    shared: SharedMemory | SilentMemory | None = None
    """Memory for small messages, where all its ranks are on this machine."""
    peers: PeerMemory | SilentPeers | None = None
    """The ranks' own memory, where they may read each other's, for sums of large tensors."""
    recorder: Recorder | None = None
    """Told how long the rank waited in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def start(world: World, timeout_s: float, shared_memory: bool = True) -> None:
    """Joins the world's rendezvous.

    Args:
        world: this rank and where the ranks meet.
        timeout_s: longest wait for another rank, now and later.
        shared_memory: whether small messages of close groups may go through shared memory.

    Raises:
        CommError: not all ranks came within ``timeout_s``.
    """
    global _one_machine, _timeout_s
    _one_machine = shared_memory and world.local_size == world.size
    _timeout_s = timeout_s
    _choose_interface(world)
    store = f"tcp://{world.address}:{world.port}"

    def join() -> None:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    _waiting(join, f"the rendezvous at {world.address}:{world.port}")


def _choose_interface(world: World) -> None:
    """Lets gloo talk over the network that leads to the other machines, if there are any.

    It would take the interface of this host's own name, which is often the loopback.
    """
    if world.local_size < world.size and _INTERFACE not in os.environ:
        interface = interface_towards(world.address)
        if interface is not None:
            os.environ[_INTERFACE] = interface


def shutdown() -> None:
    """Leaves the world."""
    _patient_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def rehearsal(rank: int, shared_memory: bool) -> Iterator[SilentWire]:
    """Lets this process do as one rank of a world that is not there, until the block ends.

    Nothing is sent, and what is received stays as it was: only what a rank allocates, computes and
    asks for is as in a real run.

    Args:
        rank: the rank that this process plays.
        shared_memory: whether the world would exchange small messages through shared memory.
    """
    global _wire
    assert _wire is dist, "one rehearsal at a time"
    _wire = SilentWire(rank, shared_memory)
    try:
        yield _wire
    finally:
        _wire = dist


def make_groups(members: list[list[int]], num_close: int = 0) -> dict[int, Group]:
    """Creates groups, all ranks in the same order.

    Args:
        members: the ranks of each group.
        num_close: the first so many groups exchange many small messages, the others sum large
            tensors; in a world that lives on one machine both go through memory.

    Returns:
        The groups that hold this rank, by their index in ``members``.
    """
    rank = _wire.get_rank()
    made = {}
    for number, ranks in enumerate(members):
        handle = None
        if len(ranks) > 1:
            handle = _waiting(functools.partial(_wire.new_group, ranks), f"group {ranks}")
        if rank in ranks:
            made[number] = Group(ranks, ranks.index(rank), handle, GATHER_TAG + number % 1024)
            made[number].shared = memory = _share_memory(made[number], number < num_close)
            if number >= num_close and memory is not None:
                silent = isinstance(memory, SilentMemory)
                index = made[number].index
                peers = SilentPeers(len(ranks)) if silent else PeerMemory(memory.gather, index)
                made[number].peers = peers if peers.works else None
    return made


def isend(tensor: Tensor, peer: int, tag: int, group: Group | None = None) -> Handle:
    """Begins to send a tensor, which must stay unchanged until the handle is done.

    A 4-dim tensor travels as NHWC, so a strip of rows of a channels-last map is sent as it lies.

    Args:
        tensor: what is sent.
        peer: rank that receives it.
        tag: a number that both sides know it by.
        group: ranks in lockstep, which both sides name alike: small messages between them go
            through shared memory where there is some, in order and without a tag.
    """
    memory = _memory_for(tensor, group)
    what = f"a send to rank {peer}"
    if group is not None and memory is not None:
        index = group.ranks.index(peer)
        _waiting(lambda: memory.send(_nhwc(tensor), index), what, peer, tag)
        return Handle(None, what)
    work = _guard(lambda: _wire.isend(_nhwc(tensor).contiguous(), peer, tag=tag), what)
    return Handle(work.wait, what, group, (peer, tag))


def irecv(tensor: Tensor, peer: int, tag: int, group: Group | None = None) -> Handle:
    """Begins to fill a dense tensor (channels-last if it has 4 dims) from another rank.

    The arguments are those of :func:`isend` on the other side.
    """
    buffer = _nhwc(tensor)
    what = f"a receive from rank {peer}"
    memory = _memory_for(tensor, group)
    if group is not None and memory is not None:
        receive = memory.expect(buffer, group.ranks.index(peer))
        return Handle(receive, what, group, (peer, tag))
    assert buffer.is_contiguous(), "a receive needs a dense buffer"
    work = _guard(lambda: _wire.irecv(buffer, peer, tag=tag), what)
    return Handle(work.wait, what, group, (peer, tag))


def all_reduce(tensor: Tensor, group: Group, wait: bool = True) -> Handle | None:
    """Sums a dense tensor over a group, in place; without ``wait`` a handle comes back."""
    if group.size == 1:
        return None
    what = f"an all-reduce among ranks {group.ranks}"
    work = _guard(lambda: _wire.all_reduce(tensor, group=group.process_group, async_op=True), what)
    handle = Handle(work.wait, what, told=(-1, -1, tuple(group.ranks)))
    if not wait:
        return handle
    begin_s = time.perf_counter()
    handle.wait()
    _note(group.recorder, COLLECTIVE, begin_s, "all-reduce")
    return None


def sum_together(tensors: list[Tensor], group: Group) -> None:
    """Sums dense tensors over a group, in place; those of one type as one message."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors if group.size > 1 else ():
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for bucket in by_type.values():
        if group.peers is not None:
            what = f"a sum among ranks {group.ranks}"
            _waiting(functools.partial(group.peers.sum, bucket), what, -1, -1, tuple(group.ranks))
        else:
            _sum_as_one(bucket, group)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Returns the tensors of all ranks of a group, stacked in the order of its ranks."""
    begin_s = time.perf_counter()
    what = f"an all-gather among ranks {group.ranks}"
    outer = doing.begin(what, ranks=tuple(group.ranks))
    try:
        gathered = _gather(tensor, group)
    finally:
        doing.end(outer)
    _note(group.recorder, COLLECTIVE, begin_s, "all-gather")
    return gathered


def _gather(tensor: Tensor, group: Group) -> Tensor:
    """Returns what :func:`all_gather` does, by the way that suits its size."""
    small = tensor.numel() * tensor.element_size() <= DIRECT_BYTES
    if group.shared is not None and small:
        return group.shared.gather(tensor)
    gathered = tensor.new_empty((group.size, *tensor.shape))
    if group.size > 1 and not small:
        parts = list(gathered.unbind(0))
        what = f"an all-gather among ranks {group.ranks}"
        _guard(
            lambda: _wire.all_gather(parts, tensor.contiguous(), group=group.process_group), what
        )
        return gathered
    gathered[group.index] = tensor
    others = [(i, rank) for i, rank in enumerate(group.ranks) if i != group.index]
    handles = [irecv(gathered[i].view(-1), rank, group.tag) for i, rank in others]
    handles += [isend(gathered[group.index].view(-1), rank, group.tag) for _, rank in others]
    for handle in handles:
        handle.wait()
    return gathered


def barrier() -> None:
    """Waits for all ranks of the world."""
    _waiting(_wire.barrier, "a barrier of all ranks")


def largest(number: int, patient: bool = False) -> int:
    """Returns the largest of the numbers that all ranks of the world give; a barrier, too.

    Args:
        number: this rank's.
        patient: whether the others may take as long as they need to read or write files.
    """
    told = torch.tensor([number])
    group = _patient_group() if patient else None
    what = "an agreement of all ranks"
    _waiting(functools.partial(_wire.all_reduce, told, op=dist.ReduceOp.MAX, group=group), what)
    return int(told)


def told_by_first(text: str) -> str:
    """Returns the text that rank 0 gives, on all ranks of the world."""
    data = text.encode()
    what = "a word of rank 0"
    size = torch.tensor([len(data)])
    _guard(lambda: _wire.broadcast(size, 0), what)
    letters = torch.zeros(int(size), dtype=torch.uint8)
    if _wire.get_rank() == 0:
        letters = torch.tensor(list(data), dtype=torch.uint8)
    if len(letters):
        _guard(lambda: _wire.broadcast(letters, 0), what)
    return bytes(letters.tolist()).decode()


@functools.cache
def _patient_group() -> Any:
    """Returns the transport's handle of all ranks who wait for each other's disks."""
    patience = datetime.timedelta(seconds=max(_timeout_s, PATIENCE_S))
    return _guard(lambda: dist.new_group(timeout=patience), "the group of all ranks")


def _note(recorder: Recorder | None, kind: str, begin_s: float, what: str) -> None:
    """Notes a wait that happened inside an action."""
    if recorder is not None and recorder.action:
        recorder.note(kind, begin_s, what)


def _sum_as_one(bucket: list[Tensor], group: Group) -> None:
    """Sums tensors of one type as one tensor."""
    flat = torch.cat([tensor.view(-1) for tensor in bucket])
    all_reduce(flat, group)
    begin = 0
    for tensor in bucket:
        tensor.view(-1).copy_(flat[begin : begin + tensor.numel()])
        begin += tensor.numel()


def _share_memory(group: Group, mail: bool) -> SharedMemory | SilentMemory | None:
    """Returns the group's shared memory, or None for all members alike."""
    if isinstance(_wire, SilentWire):
        return _wire.share_memory(group.size, mail)
    if group.size == 1 or not _one_machine or not shared.supported():
        return None
    name = torch.zeros(PATH_BYTES, dtype=torch.uint8)
    path = shared.create(group.size, mail) if group.index == 0 else None
    if path is not None:
        encoded = os.fsencode(path)
        name[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    what = f"the shared memory of ranks {group.ranks}"
    _waiting(lambda: dist.broadcast(name, group.ranks[0], group=group.process_group), what)
    told = os.fsdecode(bytes(name.tolist()).rstrip(b"\0"))
    if not told:
        return None
    memory = shared.SharedMemory(Path(told), group.size, group.index, _timeout_s, mail)
    _waiting(lambda: dist.barrier(group=group.process_group), what)
    shared.remove(Path(told))
    return memory


def _memory_for(tensor: Tensor, group: Group | None) -> SharedMemory | SilentMemory | None:
    """Returns the memory through which a message goes: a function of its size and group only."""
    if group is None or group.shared is None:
        return None
    fits = tensor.numel() * tensor.element_size() <= group.shared.mail_bytes
    return group.shared if fits else None


def _nhwc(tensor: Tensor) -> Tensor:
    """Returns a tensor in the order in which it travels: a 4-dim one as NHWC."""
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor


def _waiting(
    call: Callable[[], Any], what: str, peer: int = -1, tag: int = -1, ranks: tuple[int, ...] = ()
) -> Any:
    """Returns what :func:`_guard` does; while it lasts the rank is known to wait in it."""
    outer = doing.begin(what, peer, tag, ranks)
    try:
        return _guard(call, what)
    finally:
        doing.end(outer)


def _guard(call: Callable[[], Any], what: str) -> Any:
    """Returns what a call returns, its failure said in hires' words."""
    try:
        return call()
    except CommError as error:
        raise CommError(f"{what} failed: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CommError(f"{what} failed: {reason[0][:300]}") from error
