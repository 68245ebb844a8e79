"""Carries messages through shared memory between ranks of one machine.

Each group has memory of its own for collectives (:mod:`~hires.comm.backends.rounds`), and the world
has rings for messages (:mod:`~hires.comm.backends.peer_messages`), of which exchanges are made. A
collective blocks; one with ``async_op`` runs in the thread of its group
(:mod:`~hires.comm.backends.works`).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import mmap
import os
import platform
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hires.comm.backends import rendezvous, rings, rounds
from hires.comm.backends.backend import SUM, Backend, Members
from hires.comm.backends.counters import CROWDED_SPINS, SPINS
from hires.comm.backends.peer_messages import PeerMessage, PeerMessages
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.backends.rings import Rings
from hires.comm.backends.rounds import Rounds
from hires.comm.backends.works import Fifo, FifoWork
from hires.core.errors import CommError, RunError
from hires.core.ranks import meeting
from hires.core.ranks.world import World

_Reduction = type(SUM)


@dataclass
class ShmGroup(Members):
    """Some ranks and their memory; none where this rank is not a member."""

    number: int
    """The same on all ranks: messages of other groups are not mixed up with those of this one."""
    rounds: Rounds | None
    fifo: Fifo


class ShmBackend(Backend):
    """The functions of torch.distributed in the memory of one machine."""

    gathers_quickly = True
    name = "shm"

    def __init__(self) -> None:
        self._groups: list[ShmGroup] = []
        self._numbers = rendezvous.GroupNumbers()

    def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
        """Joins the world; CommError: its ranks share no memory; RuntimeError: one is late."""
        world, self._meeting = meeting.world, meeting
        _require_one_machine(world)
        self._store = meeting.part(self.name, timeout_s)
        store = rendezvous.part(self._store, "cores")
        own = " ".join(map(str, os.sched_getaffinity(0)))  # launchers bind ranks in many ways
        cores = {
            core
            for text in rendezvous.texts(store, world.size, world.rank)(own)
            for core in text.split()
        }
        has_cores = len(cores) >= world.size
        self._join_s = timeout_s
        self.rank, self._spins = world.rank, SPINS if has_cores else CROWDED_SPINS
        self.everyone = self._group([*range(world.size)], timeout_s)
        memory = self._share(self.everyone, "messages", rings.num_bytes(world.size))
        places = Rings(memory, world.size, world.rank, timeout_s, self._spins)
        self._messages = PeerMessages(places)

    def destroy_process_group(self) -> None:
        """Leaves the world."""
        self._messages.close()
        for group in self._groups:
            group.fifo.close()
        self._groups, self.everyone = [], None

    def new_group(self, ranks: list[int], timeout: datetime.timedelta | None = None) -> ShmGroup:
        """Makes the memory of some ranks, which meet in the store without the others."""
        timeout_s = self.limit_s(timeout)
        return self._group(ranks, timeout_s)

    def destroy_group(self, group: ShmGroup) -> None:
        """Gives the memory of a group back."""
        group.fifo.close()
        group.rounds, group.index = None, -1
        self._groups = [one for one in self._groups if one is not group]

    def isend(
        self, tensor: Tensor, dst: int, group: ShmGroup | None = None, tag: int = 0
    ) -> PeerMessage:
        """Begins to send a tensor."""
        among = self.members(group)
        among.place(dst)
        return self._messages.isend(tensor, dst, among.number, tag, among.timeout_s)

    def irecv(
        self, tensor: Tensor, src: int, group: ShmGroup | None = None, tag: int = 0
    ) -> PeerMessage:
        """Begins to receive a tensor."""
        among = self.members(group)
        among.place(src)
        return self._messages.irecv(tensor, src, among.number, tag, among.timeout_s)

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: ShmGroup | None = None, async_op: bool = False
    ) -> FifoWork | None:
        """Reduces a tensor in place."""
        among = self.members(group)
        return self._begin(among, async_op, [tensor], Rounds.reduce, tensor, tensor, op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: Any = SUM,
        group: ShmGroup | None = None,
        async_op: bool = False,
    ) -> FifoWork | None:
        """Reduces a tensor into that of a rank."""
        among = self.members(group)
        output = tensor if among.place(dst) == among.index else None
        return self._begin(among, async_op, [tensor], Rounds.reduce, tensor, output, op, root=dst)

    def broadcast(
        self, tensor: Tensor, src: int, group: ShmGroup | None = None, async_op: bool = False
    ) -> FifoWork | None:
        """Fills a tensor with that of a rank."""
        among = self.members(group)
        root, taken = among.place(src), list[Tensor | None]([None] * len(among.ranks))
        given = tensor if among.index == root else None
        taken[root] = None if among.index == root else tensor
        return self._begin(among, async_op, [tensor], Rounds.share, given, taken, root=src)

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        tensor: Tensor,
        group: ShmGroup | None = None,
        async_op: bool = False,
    ) -> FifoWork | None:
        """Fills a tensor for each rank."""
        among = self.members(group)
        return self._begin(among, async_op, outputs, Rounds.share, tensor, outputs)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: Any = SUM,
        group: ShmGroup | None = None,
        async_op: bool = False,
    ) -> FifoWork | None:
        """Reduces one tensor for each rank."""
        among = self.members(group)
        return self._begin(among, async_op, [output], Rounds.reduce_scatter, output, inputs, op)

    def barrier(self, group: ShmGroup | None = None, async_op: bool = False) -> FifoWork | None:
        """Waits for all ranks of a group."""
        among = self.members(group)
        return self._begin(among, async_op, (), Rounds.barrier)

    def _begin(
        self,
        among: ShmGroup,
        async_op: bool,
        tensors: Sequence[Tensor],
        call: Callable[..., None],
        *args: Any,
        root: int | None = None,
    ) -> FifoWork | None:
        # What decides the result, besides the sizes: ranks that differ in it find it out at once.
        facts = call.__name__, tensors[0].dtype if tensors else None, root
        kind = _kind_of(*facts, *(one for one in args if isinstance(one, _Reduction)))
        if async_op:
            return among.fifo.begin(lambda: _run(among, kind, call, args), tensors)
        among.fifo.run(_run, among, kind, call, args)
        return None

    def _group(self, ranks: list[int], timeout_s: float) -> ShmGroup:
        number = self._numbers.next(ranks)
        fifo = Fifo(f"{self.name}-{number}")
        index = ranks.index(self.rank) if self.rank in ranks else -1
        group = ShmGroup(ranks, index, timeout_s, number, None, fifo)
        if index >= 0:
            store = rendezvous.part(self._store, f"{number} meeting")
            rendezvous.meet_members(store, ranks, index, min(timeout_s, self._join_s))
            memory = self._share(group, "collectives", rounds.num_bytes(len(ranks)))
            group.rounds = Rounds(memory, ranks, index, timeout_s, self._spins)
        self._groups.append(group)
        return group

    def _share(self, group: ShmGroup, kind: str, num_bytes: int) -> memoryview:
        store = rendezvous.part(self._store, f"{group.number} {kind}")
        exchange = rendezvous.texts(store, len(group.ranks), group.index)
        what = f"the memory for {kind} of ranks {group.ranks[0]} to {group.ranks[-1]}"
        return _shared(
            exchange,
            group.index,
            num_bytes,
            what,
            self._meeting.memory_name(self.name, str(group.number), kind),
        )


@functools.cache
def _kind_of(*facts: Any) -> int:
    return zlib.crc32(" ".join(map(str, facts)).encode()) % rounds.KINDS


def _run(among: ShmGroup, kind: int, call: Callable[..., None], args: Sequence[Any]) -> None:
    assert among.rounds is not None
    among.rounds.kind = kind
    call(among.rounds, *args)


def _require_one_machine(world: World) -> None:
    if world.local_size < world.size:
        raise CommError(
            f"backend shm exchanges in the memory of one machine, and this one has "
            f"{world.local_size} of the {world.size} ranks; use gloo or mpi"
        )
    if not meeting.keeps_write_order():
        raise CommError(
            f"backend shm needs a processor that keeps the order of writes (x86_64), and "
            f"this is {platform.machine()}; use gloo or mpi"
        )


def _shared(
    exchange: Callable[[str], list[str]], index: int, num_bytes: int, what: str, name: str
) -> memoryview:
    """Returns memory of zeros that some ranks share; ``exchange`` returns the texts of all of them.

    The first makes a file, all map it, then its name goes: nothing is left behind even if a rank is
    killed later. ``name`` is the same on all of them, and follows from their secret alone
    (``WorldMeeting.memory_name``): no path is ever taken from another process.

    Raises:
        CommError: there is no room, or a rank does not see the file; all ranks raise the same one.
    """
    memory, problem = memoryview(b""), ""
    with contextlib.ExitStack() as stack:
        if index == 0:
            try:
                handle = stack.enter_context(meeting.memory_file(name, num_bytes, what))
                memory = memoryview(mmap.mmap(handle, num_bytes))
            except (RunError, OSError) as error:
                problem = str(error)
        if not (problem := exchange(problem)[0]) and index > 0:
            try:
                handle = meeting.open_memory_file(name)
                stack.callback(os.close, handle)
                memory = memoryview(mmap.mmap(handle, num_bytes))
            except (OSError, ValueError) as error:
                problem = (
                    f"{what}: its file in {meeting.memory_folder()} is not visible to all ranks "
                    f"({error}); ranks in containers must share /dev/shm (--ipc), or use gloo or "
                    f"mpi"
                )
        if problems := [*filter(None, exchange(problem))]:
            raise CommError(problems[0])
    return memory
