"""Makes the groups of ranks that call collectives together, with the memory that they share.

Ranks are always ranks of the world, never positions in a group.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hires.comm import shared
from hires.comm.attach import PeerMemory
from hires.comm.rehearsal import SilentMemory, SilentPeers, SilentWire
from hires.comm.shared import SharedMemory
from hires.comm.wire import transport, waiting
from hires.core.ranks.timeline import Recorder

GATHER_TAG = 2**31 - 1024
"""Tags from here on belong to direct gathers; the plan's are far below."""
PATH_BYTES = 4096
"""Longest name of a file that is broadcast."""


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
    """Records how long the rank waited in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


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
        if len(ranks) > 1:
            handle = waiting(
                functools.partial(transport.carrier.new_group, ranks), f"group {ranks}"
            )
        if rank in ranks:
            made[number] = Group(ranks, ranks.index(rank), handle, GATHER_TAG + number % 1024)
            made[number].shared = memory = _share_memory(made[number], number < num_close)
            if number >= num_close and memory is not None:
                silent = isinstance(memory, SilentMemory)
                index = made[number].index
                peers = SilentPeers(len(ranks)) if silent else PeerMemory(memory.gather, index)
                made[number].peers = peers if peers.works else None
    return made


def _share_memory(group: Group, mail: bool) -> SharedMemory | SilentMemory | None:
    """Returns the group's shared memory, or None for all members alike."""
    if isinstance(transport.carrier, SilentWire):
        return transport.carrier.share_memory(group.size, mail)
    if group.size == 1 or not transport.one_machine or not shared.supported():
        return None
    name = torch.zeros(PATH_BYTES, dtype=torch.uint8)
    path = shared.create(group.size, mail) if group.index == 0 else None
    if path is not None:
        encoded = os.fsencode(path)
        name[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    what = f"the shared memory of ranks {group.ranks}"
    waiting(lambda: dist.broadcast(name, group.ranks[0], group=group.process_group), what)
    shared_path = os.fsdecode(bytes(name.tolist()).rstrip(b"\0"))
    if not shared_path:
        return None
    memory = shared.SharedMemory(
        Path(shared_path), group.size, group.index, transport.timeout_s, mail
    )
    waiting(lambda: dist.barrier(group=group.process_group), what)
    shared.remove(Path(shared_path))
    return memory
