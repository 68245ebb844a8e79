"""Joins and leaves the world, and holds the transport of all messages.

The transport is ``torch.distributed``, or in a rehearsal one that sends nothing. A failure names
the operation and the other side.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hires.comm.rehearsal import SilentWire
from hires.core.errors import CommError
from hires.core.ranks.heartbeat import Activity
from hires.core.ranks.network import interface_towards
from hires.core.ranks.world import World

_INTERFACE = "GLOO_SOCKET_IFNAME"

PATIENCE_S = 3600.0
"""Longest wait for a rank that reads or writes a large file."""


@dataclass
class Transport:
    """The transport of this rank."""

    carrier: Any = dist
    """torch.distributed, or in a rehearsal what sends nothing."""
    one_machine: bool = False
    """Whether all ranks are on this machine and may exchange small messages in its memory."""
    timeout_s: float = 0.0
    """Longest wait for another rank."""


# Set once by start(), like the process groups of torch.distributed themselves.
transport = Transport()

activity = Activity()
"""What this rank waits in, for whoever finds that it does not move."""


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
    store = f"tcp://{world.address}:{world.port}"

    def join() -> None:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    waiting(join, f"the rendezvous at {world.address}:{world.port}")


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
    patient_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def rehearsal(rank: int, shared_memory: bool) -> Iterator[SilentWire]:
    """Runs this process as one rank without the other ranks, until the block ends.

    Nothing is sent, and receive buffers keep their contents. Allocations, computations and calls
    are those of a real run.

    Args:
        rank: the rank that this process plays.
        shared_memory: whether the world would exchange small messages through shared memory.
    """
    assert transport.carrier is dist, "one rehearsal at a time"
    transport.carrier = SilentWire(rank, shared_memory)
    try:
        yield transport.carrier
    finally:
        transport.carrier = dist


@functools.cache
def patient_group() -> Any:
    """Returns the group of all ranks with a timeout long enough for slow disks."""
    patience = datetime.timedelta(seconds=max(transport.timeout_s, PATIENCE_S))
    return guard(lambda: dist.new_group(timeout=patience), "the group of all ranks")


def waiting(
    call: Callable[[], Any], what: str, peer: int = -1, tag: int = -1, ranks: tuple[int, ...] = ()
) -> Any:
    """Returns what :func:`guard` does; while it lasts the rank is known to wait in it."""
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
