"""Joins and leaves the world, makes its groups, and holds the backend of all messages.

A failure names the operation and the other side. Ranks are always ranks of the world, never
positions in a group.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hires.comm import shared
from hires.comm.attach import PeerMemory
from hires.comm.comm_backends import BACKENDS, HOST_ONLY, REACHES
from hires.comm.group_calls import Channels
from hires.comm.rehearsal import SilentBackend, SilentMemory
from hires.comm.shared import SharedMemory
from hires.comm.staging import Allocate, Staging, plain_empty
from hires.core.errors import CommError, RunError
from hires.core.ranks import mailbox_limits, memory_files
from hires.core.ranks.heartbeat import Activity
from hires.core.ranks.timeline import Recorder
from hires.core.ranks.world import World
from hires.plan.channels import Channel

PATIENCE_S = 3600.0  # longest wait for a rank that reads or writes a large file
GATHER_TAG = 2**31 - 1024  # tags from here on belong to direct gathers; the plan's are far below


@dataclass
class Transport:
    """The transport of this rank."""

    backend: Any = dist  # has the functions of torch.distributed
    one_machine: bool = False  # all ranks are here, and may exchange small messages in memory
    timeout_s: float = 0.0  # longest wait for another rank
    channels: Channels | None = None  # of messages, where the backend has streams
    staging: Staging = field(default_factory=lambda: Staging(HOST_ONLY))
    """The host's buffers for tensors that the backend does not reach."""


# Set once by start(), like the process groups of torch.distributed themselves.
transport = Transport()
activity = Activity()  # the communication that this rank waits in, for the heartbeat


@dataclass
class Group:
    """Some ranks, in ascending order, that call collectives together."""

    ranks: list[int]
    index: int  # position of this rank among them
    process_group: Any  # the backend's own handle; None for a group of one
    tag: int  # of its direct gathers
    shared: SharedMemory | SilentMemory | None = None
    """Memory for small messages, where all its ranks are on this machine."""
    peers: PeerMemory | SilentMemory | None = None
    """The ranks' own memory, where they may read each other's, for sums of large tensors."""
    recorder: Recorder | None = None  # records how long the rank waited in the group

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def start(
    world: World,
    timeout_s: float,
    shared_memory: bool = True,
    backend: str = "gloo",
    host_empty: Allocate = plain_empty,
) -> None:
    """Joins the world's rendezvous; CommError: not all ranks came within ``timeout_s``.

    That is also the longest wait for another rank later. With ``shared_memory`` close groups may
    send small messages through it; ``backend``, of ``BACKENDS``, carries the others. ``host_empty``
    allocates what messages of the rank's device go through, where that is not reached.
    """
    transport.one_machine = shared_memory and world.local_size == world.size
    transport.timeout_s = timeout_s
    transport.staging = Staging(REACHES.get(backend, HOST_ONLY), host_empty)
    join = functools.partial(BACKENDS[backend], world, timeout_s)
    transport.backend = waiting(join, f"the rendezvous at {world.address}:{world.port}")
    # Streams have their own way between GPUs of one machine, and one order for all messages.
    transport.one_machine &= not has_streams()


def has_streams() -> bool:
    """Whether messages of the backend pass streams in the order of posting, without tags."""
    return bool(getattr(transport.backend, "has_streams", False))


def open_channels(
    channels: Sequence[Channel], groups: dict[int, Group], device: torch.device
) -> None:
    """Makes the plan's communicators where the backend has streams; all ranks call it together.

    They and those of the groups are connected now: later a rank would wait for the others inside
    what it only begins, which no proof has.
    """
    if not has_streams():
        return
    for number in sorted(groups):  # all ranks come to the groups in one order
        if groups[number].size > 1:
            first = functools.partial(
                transport.backend.all_reduce,
                torch.zeros(1, device=device),
                group=groups[number].process_group,
            )
            waiting(first, f"the first sum among ranks {groups[number].ranks}")
    make = functools.partial(Channels, transport.backend, channels, device)
    transport.channels = waiting(make, "the first messages on each channel")


def shutdown() -> None:
    """Leaves the world."""
    patient_group.cache_clear()
    transport.channels = None
    if transport.backend.is_initialized():
        transport.backend.destroy_process_group()


@contextlib.contextmanager
def rehearsal(rank: int, shared_memory: bool) -> Iterator[SilentBackend]:
    """Runs this process as one rank without the other ranks, until the block ends.

    Nothing is sent, and receive buffers keep their contents. All else is as in a real run.
    """
    real, silent = (transport.backend, transport.channels), SilentBackend(rank, shared_memory)
    assert not isinstance(real[0], SilentBackend), "one rehearsal at a time"
    transport.backend, transport.channels = silent, None
    try:
        yield silent
    finally:
        transport.backend, transport.channels = real


def make_groups(members: list[list[int]], num_close: int = 0) -> dict[int, Group]:
    """Creates groups, all ranks in the same order; returns this rank's by index in ``members``.

    The first ``num_close`` groups exchange many small messages, the others sum large tensors; in a
    world that lives on one machine both go through memory.
    """
    rank = transport.backend.get_rank()
    made = {}
    for number, ranks in enumerate(members):
        handle = None
        if len(ranks) > 1:  # collective over the world: members and others call it
            create = functools.partial(transport.backend.new_group, ranks)
            handle = waiting(create, f"group {ranks}")
        if rank not in ranks:
            continue
        group = Group(ranks, ranks.index(rank), handle, GATHER_TAG + number % 1024)
        mail_bytes = mailbox_limits.mail_bytes(len(ranks)) if number < num_close else 0
        group.shared = memory = _share_memory(group, mail_bytes)
        if number >= num_close and memory is not None:
            group.peers = memory.peers()
        made[number] = group
    return made


@functools.cache
def patient_group() -> Any:
    """Returns the group of all ranks with a timeout long enough for slow disks."""
    patience = datetime.timedelta(seconds=max(transport.timeout_s, PATIENCE_S))
    return guard(lambda: transport.backend.new_group(timeout=patience), "the group of all ranks")


def broadcast_text(
    text: str, what: str = "a broadcast of rank 0", source: int = 0, process_group: Any = None
) -> str:
    """Returns the text of one rank, ``source``, on every rank of a group or of the world."""
    backend, data = transport.backend, os.fsencode(text)
    # As tensors, not as pickled objects: a stranger at the port must not be able to run code.
    size = torch.tensor([len(data)])
    waiting(lambda: backend.broadcast(size, source, group=process_group), what)
    letters = torch.zeros(int(size), dtype=torch.uint8)
    if backend.get_rank() == source:
        letters = torch.tensor(list(data), dtype=torch.uint8)
    if len(letters):
        waiting(lambda: backend.broadcast(letters, source, group=process_group), what)
    return os.fsdecode(bytes(letters.tolist()))


def waiting(
    call: Callable[[], Any], what: str, peer: int = -1, tag: int = -1, ranks: tuple[int, ...] = ()
) -> Any:
    """Returns what :func:`guard` does; meanwhile ``activity`` shows that the rank waits in it."""
    outer = activity.begin(what, peer, tag, ranks)
    try:
        return guard(call, what)
    finally:
        activity.end(outer)


def guard(call: Callable[[], Any], what: str) -> Any:
    """Returns the result of a call; a failure of the backend becomes a ``CommError``."""
    try:
        return call()
    except CommError as error:
        raise CommError(f"{what} failed: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CommError(f"{what} failed: {reason[0][:300]}") from error


def _share_memory(group: Group, mail_bytes: int) -> SharedMemory | SilentMemory | None:
    # The group's shared memory, or None for all members alike.
    backend = transport.backend
    if isinstance(backend, SilentBackend):
        return backend.share_memory(group.size, mail_bytes)
    if group.size == 1 or not transport.one_machine or not shared.supported():
        return None
    # The first member makes a file, all open it, then its name goes: nothing is left behind even
    # if a rank is killed later.
    what, handle = f"the shared memory of ranks {group.ranks}", group.process_group
    with contextlib.ExitStack() as stack:
        name, problem = "", None
        if group.index == 0:
            num_bytes = shared.num_bytes(group.size, mail_bytes)
            ranks = f"the exchange of ranks {group.ranks[0]} to {group.ranks[-1]}"
            try:
                name = str(stack.enter_context(memory_files.memory_file(num_bytes, ranks)))
            except RunError as error:
                problem = error
        name = broadcast_text(name, what, group.ranks[0], handle)
        if not name:  # no room
            raise problem or CommError(f"{what} was not made; rank {group.ranks[0]} says why")
        memory = SharedMemory(Path(name), group.size, group.index, transport.timeout_s, mail_bytes)
        waiting(lambda: backend.barrier(group=handle), what)
    return memory
