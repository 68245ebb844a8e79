"""Stand-ins for NCCL: one with its order of posts in threads, one over gloo for real ranks.

The first shares no code with the abstract machine, nor with what makes the group calls.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends import rendezvous
from hires.comm.backends.known_backends import BACKENDS
from hires.comm.backends.nccl import NcclBackend
from hires.core.ranks.world import World
from tests.helpers.jobs import verify

HARD_TIMEOUT_S = 60.0


@dataclass(eq=False)
class Op:
    """One side of a message, as torch.distributed.P2POp."""

    kind: Any
    tensor: Tensor
    peer: int
    group: int


class Call:
    """A group call on one stream; it ends when both sides of all its messages have run."""

    def __init__(self, rank: int, ops: list[Op], wire: Wire) -> None:
        self.rank, self.ops, self.open, self.wire = rank, ops, list(ops), wire

    def wait(self) -> None:
        """Returns when the call is over, as a host that synchronises with its stream."""
        with self.wire.lock:
            over = self.wire.lock.wait_for(lambda: not self.open, HARD_TIMEOUT_S)
            assert over, f"rank {self.rank} waits for ever"


class Wire:
    """What joins the ranks: a stream for each rank and group, whose first call runs."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.streams: dict[tuple[int, int], deque[Call]] = defaultdict(deque)
        self.members: dict[int, list[int]] = {}

    def add(self, call: Call) -> None:
        """Puts a call on its stream, and runs what can run."""
        with self.lock:
            self.streams[call.rank, call.ops[0].group].append(call)
            while self._meet():
                pass
            self.lock.notify_all()

    def _meet(self) -> bool:
        for (rank, group), stream in self.streams.items():
            while stream and not stream[0].open:
                stream.popleft()
            for op in list(stream[0].open) if stream else ():
                there = self.streams.get((op.peer, group))
                if op.kind != "send" or not there:
                    continue
                # There are no tags: the first receive from this rank takes what comes first.
                kinds = (o for o in there[0].open if (o.kind, o.peer) == ("recv", rank))
                if (other := next(kinds, None)) is not None:
                    assert other.tensor.shape == op.tensor.shape
                    other.tensor.copy_(op.tensor)
                    stream[0].open.remove(op)
                    there[0].open.remove(other)
                    return True
        return False


class ThreadBackend:
    """The backend of one rank that is a thread."""

    isend, irecv, P2POp = "send", "recv", Op

    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank, self.wire, self.made = rank, wire, 0
        self.calls: list[tuple[int, int]] = []
        """(group, number of messages) of each call."""

    def get_rank(self) -> int:
        return self.rank

    def new_channel(self, ranks: list[int]) -> int:
        self.made += 1
        assert self.wire.members.setdefault(self.made, ranks) == ranks
        return self.made

    def batch_isend_irecv(self, ops: list[Op]) -> list[Call]:
        [group] = {op.group for op in ops}
        assert all({self.rank, op.peer} <= {*self.wire.members[group]} for op in ops)
        self.calls.append((group, len(ops)))
        call = Call(self.rank, ops, self.wire)
        self.wire.add(call)
        return [call]


class Library:
    """torch.distributed over gloo, under the names of NCCL."""

    def __init__(self) -> None:
        self.backends: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def is_nccl_available(self) -> bool:
        return True

    def init_process_group(self, backend: str, *args: Any) -> None:
        self.backends.append(backend)
        dist.init_process_group("gloo", *args)

    def new_group(self, ranks: Any, timeout: Any, backend: str) -> Any:
        self.backends.append(backend)
        return dist.new_group(ranks, timeout, "gloo")


def verify_on_channels(
    world: World, config: dict[str, Any], plan: dict[str, Any], folder: str
) -> tuple[Any, list[str]]:
    """Returns verify.json of rank 0, and the backends of all groups, in order."""
    library = Library()

    def join(world: World, timeout_s: float) -> NcclBackend:
        backend = NcclBackend(library)
        store = rendezvous.store(world, timeout_s, "nccl")
        backend.join(store, timeout_s, world.size, world.rank)
        return backend

    BACKENDS._items["nccl"] = join
    torch.set_num_threads(1)
    # Its routes are those of the plan for gloo; without them everything takes its backend.
    return verify(world, config, {**plan, "routes": []}, folder), library.backends
