"""Joins and leaves the world, makes its groups, and holds the transport of all messages.

The transport is ``torch.distributed``, or in a rehearsal one that sends nothing. A failure names
the operation and the other side. Ranks are always ranks of the world, never positions in a group.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hires.comm import shared
from hires.comm.attach import PeerMemory
from hires.comm.rehearsal import SilentMemory, SilentWire
from hires.comm.shared import SharedMemory
from hires.core.errors import CommError
from hires.core.ranks.heartbeat import Activity
from hires.core.ranks.network import interface_towards
from hires.core.ranks.timeline import Recorder
from hires.core.ranks.world import World

_INTERFACE = "GLOO_SOCKET_IFNAME"

_PATH_BYTES = 4096  # the longest path of Linux
PATIENCE_S = 3600.0
"""Longest wait for a rank that reads or writes a large file."""
GATHER_TAG = 2**31 - 1024
"""Tags from here on belong to direct gathers; the plan's are far below."""


@dataclass
class Transport:
    """The transport of this rank."""

    carrier: Any = dist  # torch.distributed, or in a rehearsal what sends nothing
    one_machine: bool = False  # all ranks are here, and may exchange small messages in memory
    timeout_s: float = 0.0  # longest wait for another rank


# Set once by start(), like the process groups of torch.distributed themselves.
transport = Transport()
activity = Activity()
"""The communication that this rank waits in, for the heartbeat."""


@dataclass
class Group:
    """Some ranks, in ascending order, that call collectives together."""

    ranks: list[int]
    index: int  # position of this rank among them
    process_group: Any  # the transport's own handle; None for a group of one
    tag: int  # of its direct gathers
    shared: SharedMemory | SilentMemory | None = None
    """Memory for small messages, where all its ranks are on this machine."""
    peers: PeerMemory | SilentMemory | None = None
    """The ranks' own memory, where they may read each other's, for sums of large tensors."""
    recorder: Recorder | None = None
    """Records how long the rank waited in the group."""

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
    transport.one_machine = shared_memory and world.local_size == world.size
    transport.timeout_s = timeout_s
    _choose_interface(world)
    join = functools.partial(
        dist.init_process_group,
        "gloo",
        init_method=f"tcp://{world.address}:{world.port}",
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    waiting(join, f"the rendezvous at {world.address}:{world.port}")


def shutdown() -> None:
    """Leaves the world."""
    patient_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def rehearsal(rank: int, shared_memory: bool) -> Iterator[SilentWire]:
    """Runs this process as one rank without the other ranks, until the block ends.

    Nothing is sent, and receive buffers keep their contents. Allocations, computations and calls
    are those of a real run. ``shared_memory``: the world would exchange small messages through it.
    """
    assert transport.carrier is dist, "one rehearsal at a time"
    transport.carrier = SilentWire(rank, shared_memory)
    try:
        yield transport.carrier
    finally:
        transport.carrier = dist


def make_groups(members: list[list[int]], num_close: int = 0) -> dict[int, Group]:
    """Creates groups, all ranks in the same order.

    Args:
        members: the ranks of each group.
        num_close: the first so many groups exchange many small messages, the others sum large
            tensors; in a world that lives on one machine both go through memory.

    Returns:
        The groups that hold this rank, by their index in ``members``.
    """
    rank = transport.carrier.get_rank()
    made = {}
    for number, ranks in enumerate(members):
        handle = None
        if len(ranks) > 1:  # collective over the world: members and others call it
            create = functools.partial(transport.carrier.new_group, ranks)
            handle = waiting(create, f"group {ranks}")
        if rank not in ranks:
            continue
        group = Group(ranks, ranks.index(rank), handle, GATHER_TAG + number % 1024)
        group.shared = memory = _share_memory(group, number < num_close)
        if number >= num_close and memory is not None:
            if isinstance(memory, SilentMemory):
                group.peers = memory
            else:
                peers = PeerMemory(memory.gather, group.index)
                group.peers = peers if peers.works else None
        made[number] = group
    return made


@functools.cache
def patient_group() -> Any:
    """Returns the group of all ranks with a timeout long enough for slow disks."""
    patience = datetime.timedelta(seconds=max(transport.timeout_s, PATIENCE_S))
    return guard(lambda: dist.new_group(timeout=patience), "the group of all ranks")


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
    """Returns the result of a call; a failure of the transport becomes a ``CommError``."""
    try:
        return call()
    except CommError as error:
        raise CommError(f"{what} failed: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CommError(f"{what} failed: {reason[0][:300]}") from error


def _choose_interface(world: World) -> None:
    # The network that leads to the other machines, if there are any: gloo would take the interface
    # of this host's own name, which is often the loopback.
    if world.local_size < world.size and _INTERFACE not in os.environ:
        interface = interface_towards(world.address)
        if interface is not None:
            os.environ[_INTERFACE] = interface


def _share_memory(group: Group, mail: bool) -> SharedMemory | SilentMemory | None:
    # The group's shared memory, or None for all members alike.
    if isinstance(transport.carrier, SilentWire):
        return transport.carrier.share_memory(group.size, mail)
    if group.size == 1 or not transport.one_machine or not shared.supported():
        return None
    # The first member makes a file, all open it, then its name goes: nothing is left behind even
    # if a rank is killed later. Without a file (no room) they agree on None.
    what, pg = f"the shared memory of ranks {group.ranks}", group.process_group
    path = shared.create(group.size, mail) if group.index == 0 else None
    name = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
    if path is not None:
        encoded = os.fsencode(path)
        name[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    waiting(lambda: dist.broadcast(name, group.ranks[0], group=pg), what)
    file = Path(os.fsdecode(bytes(name.tolist()).rstrip(b"\0")))
    if file == Path():
        return None
    memory = SharedMemory(file, group.size, group.index, transport.timeout_s, mail)
    waiting(lambda: dist.barrier(group=pg), what)
    file.unlink(missing_ok=True)
    return memory
