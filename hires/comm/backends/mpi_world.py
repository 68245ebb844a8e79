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
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hires.comm.backends import rendezvous
from hires.comm.backends.backend_protocol import MEETING_TAG, RESERVED_TAGS, TAGS, Members
from hires.comm.backends.composed import Composed
from hires.comm.backends.mpi_progress import Progress
from hires.comm.backends.mpi_types import HALVES, SMALL
from hires.core.errors import CommError
from hires.core.ranks import mpi_library
from hires.core.ranks.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_OF_MESSAGES = (
    *("isend", "irecv", "gather", "scatter", "reduce_scatter"),
    *("all_to_all", "all_to_all_single"),
)
"""Operations that are sends and receives of the library."""
_SUMS = ("all_reduce", "reduce", "reduce_scatter_tensor")


@dataclass
class MpiGroup(Members):
    """Some ranks in ascending order; no communicator where this rank is not one of them."""

    comm: MPI.Intracomm | None


class MpiWorld(Composed):
    """The part of a backend that is no operation."""

    def __init__(self) -> None:
        self._joined = False

    def join(self, world: World, timeout_s: float) -> None:
        """Joins the world; CommError: mpi4py finds no library, or not that of the launcher."""
        if world.local_size == world.size:  # all ranks have come: MPI waits without a limit
            rendezvous.store(world, timeout_s, "mpi")
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
        self._rank, self._joined = world.rank, True
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
        self._all = MpiGroup([*range(world.size)], world.rank, timeout_s, collectives)

    @property
    def calls(self) -> threading.Lock:
        """One thread of this rank holds it while it calls MPI, past this backend too."""
        return self._progress.lock

    def is_initialized(self) -> bool:
        """Whether this rank is part of the world."""
        return self._joined

    def destroy_process_group(self) -> None:
        """Leaves the world; all ranks do. One that fails calls :meth:`abort`."""
        self.abort()
        mpi_library.end(self._mpi)

    def abort(self) -> None:
        """Leaves the world without the other ranks, for which the end of MPI would wait."""
        self._joined = False
        self._progress.close()

    def reaches(self, method: str, dtype: torch.dtype | None) -> bool:
        """Whether the library reads the memory of GPUs in an operation: never tried on a GPU.

        Sums of halves and of small whole numbers are ours, in the host's memory.
        """
        if method in _OF_MESSAGES:
            return self._gpus.messages
        is_ours = method in _SUMS and dtype in (*HALVES, *SMALL)
        return self._gpus.collectives and bool(method) and not is_ours

    def get_rank(self) -> int:
        """Returns this rank."""
        return self._rank

    def new_group(
        self,
        ranks: list[int] | None = None,
        timeout: datetime.timedelta | None = None,
        members_only: bool = False,
    ) -> MpiGroup:
        """Makes a communicator; all ranks of the world call it in one order, or its members.

        They wait for each other for as long as the world does, or the group, if that is longer.
        CommError: a rank did not come, or makes another group at this place. Only a rank that ends
        within the MPI's own call, right after all have met, leaves the others there.
        """
        ranks = self._all.ranks if ranks is None else sorted(ranks)
        timeout_s = self._all.timeout_s if timeout is None else timeout.total_seconds()
        # The MPI call has no time limit, so all ranks meet under one before it.
        limit = datetime.timedelta(seconds=max(timeout_s, self._all.timeout_s))
        self._meet(ranks if members_only else self._all.ranks, ranks, limit)
        if self._rank not in ranks:
            return MpiGroup(ranks, -1, timeout_s, None)
        with self._progress.lock:
            group = self._mpi.COMM_WORLD.Get_group().Incl(ranks)
            comm = self._mpi.COMM_WORLD.Create_group(group)
        return MpiGroup(ranks, ranks.index(self._rank), timeout_s, comm)

    def destroy_group(self, group: MpiGroup) -> None:
        """Frees a communicator; all its members do, and MPI ends what is under way there first."""
        comm, group.comm = group.comm, None
        if comm is not None and self._joined:
            with self._progress.lock:
                comm.Free()

    def _meet(self, among: list[int], ranks: list[int], limit: datetime.timedelta) -> None:
        # Returns once all ranks of ``among``, which may have no communicator yet, make a group of
        # the same ``ranks``. Each passes on the least and largest (group, rank) that it has seen:
        #     0 -> 1 -> 2 -> 3 -> 4 -> 0,   then each to the second behind it,   then to the fourth
        own = zlib.crc32(str(ranks).encode()) * TAGS + self._rank
        seen, place, step = [own, own], among.index(self._rank), 1
        while step < len(among):
            after, before = (among[(place + by) % len(among)] for by in (step, -step))
            given, taken = torch.tensor(seen), torch.tensor(seen)
            works = [self.irecv(taken, before, None, MEETING_TAG)]
            works.append(self.isend(given, after, None, MEETING_TAG))
            for work in works:
                work.wait(limit)
            least, largest = taken.tolist()
            seen = [min(seen[0], least), max(seen[1], largest)]
            step *= 2
        (one, first), (other, second) = (divmod(number, TAGS) for number in seen)
        if one != other:
            raise CommError(
                f"ranks {first} and {second} make different groups at the same time, and this rank "
                f"one of ranks {ranks}; all ranks make the same groups in one order"
            )

    def members(self, group: MpiGroup | None) -> MpiGroup:
        """Returns a handle, or that of the world."""
        return self._all if group is None else group

    def barrier(self, group: MpiGroup | None = None, async_op: bool = False) -> Any:
        """Waits for all ranks of a group, or of the world."""
        raise NotImplementedError

    def _members(self, group: MpiGroup | None) -> tuple[MpiGroup, MPI.Intracomm]:
        among = self._all if group is None else group
        if among.comm is None:
            raise ValueError(f"rank {self._rank} is not among ranks {among.ranks}")
        return among, among.comm

    def _channel(
        self, rank: int, group: MpiGroup | None, tag: int
    ) -> tuple[MPI.Intracomm, int, int]:
        # Of the world:
        # tags      0 ........ n - 1            2^31 - n ........ 2^31 - 1
        #           lower: 0 to n - 1           upper: 0 to n - 1            n: what the MPI has
        # Of a group, which has one: users' tags, and the reserved ones as the highest.
        upper = tag - (TAGS - self._num_tags)
        if group is not None and group is not self._all:
            among, comm = self._members(group)
            if 0 <= tag < self._num_tags - (TAGS - RESERVED_TAGS):
                return comm, among.place(rank), tag
            if RESERVED_TAGS <= tag < TAGS:
                return comm, among.place(rank), upper
        elif 0 <= tag < self._num_tags:
            return self._lower, rank, tag
        elif 0 <= upper < self._num_tags:
            return self._upper, rank, upper
        raise ValueError(f"tag {tag} is beyond the {self._num_tags} of this MPI; use fewer stages")
