"""Joins the world of an MPI library, makes the communicators of groups, and chooses that of a tag.

communicator      carries
world             messages with the lower tags; barriers
upper             messages with the highest tags of 31 bits: many an MPI has fewer of them
one a group       its collectives, in the order of the calls, and its messages
"""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hires.comm.backends import rendezvous
from hires.comm.backends.backend import HALVES, RESERVED_TAGS, TAGS, Backend, Members
from hires.comm.backends.mpi_progress import Progress
from hires.comm.backends.rendezvous import WorldMeeting
from hires.core.errors import CommError
from hires.core.ranks import mpi_library

if TYPE_CHECKING:
    from mpi4py import MPI

_OF_MESSAGES = ("isend", "irecv", "exchange")
"""Operations that are sends and receives of the library; a reduce-scatter may be, too."""
_SUMS = ("all_reduce", "reduce", "reduce_scatter")
_open: list[MpiWorld] = []  # the one that this process is part of


@dataclass
class MpiGroup(Members):
    """Some ranks in ascending order; no communicator where this rank is not one of them."""

    comm: MPI.Intracomm | None


class MpiWorld(Backend):
    """The part of a backend that is no operation."""

    def __init__(self) -> None:
        self._numbers = rendezvous.GroupNumbers()

    def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
        """Joins the world; CommError: mpi4py finds no library, or not that of the launcher."""
        if _open:  # one lock keeps the calls of two threads apart, and MPI ends once
            raise CommError("this process uses MPI in another world; leave that, or use gloo")
        world = meeting.world
        # All ranks have come then: MPI itself waits without a limit.
        self._store = meeting.part("mpi", timeout_s)
        self._mpi = mpi = mpi_library.load()
        self._buffer = mpi.buffer.fromaddress
        mpi_library.start(mpi)
        name = mpi_library.first_line(mpi.Get_library_version())
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise CommError(f"{name} was built for one thread, and two take turns; use another MPI")
        every = mpi.COMM_WORLD
        if (every.rank, every.size) != (world.rank, world.size):
            raise CommError(
                f"to {name} this is rank {every.rank} of {every.size}, and to its launcher rank "
                f"{world.rank} of {world.size}: they do not belong together; see `hires doctor`"
            )
        self.rank = world.rank
        self._lower, self._upper = every.Dup(), every.Dup()
        self._num_tags = min((every.Get_attr(mpi.TAG_UB) or 32767) + 1, TAGS)
        # To look for a message that is never sent moves all requests on.
        unused, collectives = every.Dup(), every.Dup()
        self._gpus = mpi_library.gpu_support(mpi)
        begin: Callable[[], object] = int
        if self._gpus.messages and torch.cuda.is_available():
            begin = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
        self._progress = Progress(lambda: unused.Iprobe(world.rank, 0), begin)
        self._progress.status, self._progress.truncated = mpi.Status(), mpi.ERR_TRUNCATE
        self.everyone = MpiGroup([*range(world.size)], world.rank, timeout_s, collectives)
        _open.append(self)

    @property
    def calls(self) -> threading.Lock:
        """One thread of this rank holds it while it calls MPI, past this backend too."""
        return self._progress.lock

    def destroy_process_group(self) -> None:
        """Leaves the world; all ranks do. One that fails calls :meth:`abort`."""
        self.abort()
        mpi_library.end(self._mpi)

    def abort(self) -> None:
        """Leaves the world without the other ranks, for which the end of MPI would wait."""
        if self.is_initialized():
            self.everyone = None
            _open.remove(self)
            self._progress.close()

    def reaches(self, method: str, dtype: torch.dtype | None) -> bool:
        """Whether the library reads the memory of GPUs in an operation: never tried on a GPU.

        Sums of halves are ours, in the host's memory.
        """
        if method in _OF_MESSAGES:
            return self._gpus.messages
        is_ours = method in _SUMS and dtype in HALVES
        messages = self._gpus.messages or method != "reduce_scatter"
        return self._gpus.collectives and messages and bool(method) and not is_ours

    def new_group(self, ranks: list[int], timeout: datetime.timedelta | None = None) -> MpiGroup:
        """Makes a communicator of members that have met in the store; PeerError: one is late.

        Only a rank that ends within the MPI's own call leaves the others there: it has no limit.
        """
        timeout_s = self.limit_s(timeout)
        if self.rank not in ranks:
            return MpiGroup(ranks, -1, timeout_s, None)
        store = rendezvous.part(self._store, str(self._numbers.next(ranks)))
        limit_s = min(timeout_s, self.everyone.timeout_s)
        rendezvous.meet_members(store, ranks, ranks.index(self.rank), limit_s)
        with self._progress.lock:
            group = self._mpi.COMM_WORLD.Get_group().Incl(ranks)
            comm = self._mpi.COMM_WORLD.Create_group(group)
        return MpiGroup(ranks, ranks.index(self.rank), timeout_s, comm)

    def destroy_group(self, group: MpiGroup) -> None:
        """Frees a communicator; all its members do, and MPI ends what is under way there first."""
        comm, group.comm = group.comm, None
        if comm is not None and self.is_initialized():
            with self._progress.lock:
                comm.Free()

    def members(self, group: MpiGroup | None) -> MpiGroup:
        """Returns a handle, or that of the world."""
        return self.everyone if group is None else group

    def _members(self, group: MpiGroup | None) -> tuple[MpiGroup, MPI.Intracomm]:
        among = self.everyone if group is None else group
        if among.comm is None:
            raise ValueError(f"rank {self.rank} is not among ranks {among.ranks}")
        return among, among.comm

    def _channel(
        self, rank: int, group: MpiGroup | None, tag: int
    ) -> tuple[MpiGroup, MPI.Intracomm, int, int]:
        # Of the world:
        # tags      0 ........ n - 1            2^31 - n ........ 2^31 - 1
        #           lower: 0 to n - 1           upper: 0 to n - 1            n: what the MPI has
        # Of a group, which has one: users' tags, and the reserved ones as the highest.
        upper = tag - (TAGS - self._num_tags)
        if group is not None and group is not self.everyone:
            among, comm = self._members(group)
            if 0 <= tag < self._num_tags - (TAGS - RESERVED_TAGS):
                return among, comm, among.place(rank), tag
            if RESERVED_TAGS <= tag < TAGS:
                return among, comm, among.place(rank), upper
        elif 0 <= tag < self._num_tags:
            return self.everyone, self._lower, rank, tag
        elif 0 <= upper < self._num_tags:
            return self.everyone, self._upper, rank, upper
        raise ValueError(f"this MPI has tags 0 to {self._num_tags - 1}, got {tag}")
