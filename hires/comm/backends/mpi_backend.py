"""Carries messages with the MPI library whose launcher started the ranks, through mpi4py.

It has the functions of ``torch.distributed`` (:mod:`~hires.comm.backends.backend`) for
tensors of the host's memory. Messages and gathers travel as bytes, whatever their type. MPI has no
sums of fp16 and bf16, so these are ours: each addition is made in fp32 and rounded, as gloo does
it. Operations whose sizes may differ are composed of messages: a call with counts (Alltoallv) takes
fewer numbers than it has room for, and reports nothing. No call blocks inside the library.

communicator      carries
world             messages with the lower tags; barriers
upper             messages with the highest tags of 31 bits: many an MPI has fewer of them
one a group       its collectives, in the order of the calls, and its messages

Source:
    Dalcin and Fang, "mpi4py: status update after 12 years of development", CiSE 2021; MPI 4.0,
    sections 3.5 (order of messages), 3.7.4 and 6.12 (progress).
"""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends import rendezvous
from hires.comm.backends.backend import (
    COMBINE,
    HALVES,
    RESERVED_TAGS,
    SUM,
    TAGS,
    Backend,
    Members,
    finished,
    row_of,
)
from hires.comm.backends.mpi_progress import MpiWork, Progress
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.backends.works import JoinedWork
from hires.core.errors import CommError
from hires.core.ranks import mpi_library

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 2**30  # longer messages are cut: before MPI 4 a call counts to 2^31 - 1
SUM_PIECE_BYTES, MOST_PIECES = 2**20, 64
"""A nonblocking sum of pieces takes a third less: while one is added up, another travels."""


TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.float16: "UINT16_T",
    torch.bfloat16: "UINT16_T",
}
"""Halves have no counterpart: they travel as 16 bits, and the operation is ours."""
REDUCTIONS: dict[Any, str] = {
    dist.ReduceOp.SUM: "SUM",
    dist.ReduceOp.MAX: "MAX",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.PRODUCT: "PROD",
    dist.ReduceOp.BAND: "BAND",
    dist.ReduceOp.BOR: "BOR",
    dist.ReduceOp.BXOR: "BXOR",
}


_open: list[MpiBackend] = []  # the one that this process is part of


@dataclass
class MpiGroup(Members):
    """Some ranks in ascending order; no communicator where this rank is not one of them."""

    comm: MPI.Intracomm | None


class MpiBackend(Backend):
    """The functions of torch.distributed over one MPI library."""

    gathers_quickly = True

    def __init__(self) -> None:
        self._numbers = rendezvous.GroupNumbers()
        self._reductions: dict[Any, tuple[Any, Any]] = {}

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
        self._progress = Progress(lambda: unused.Iprobe(world.rank, 0))
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

    def isend(
        self, tensor: Tensor, dst: int, group: MpiGroup | None = None, tag: int = 0
    ) -> MpiWork:
        """Begins to send a tensor."""
        return self._progress.begin(self._sent(tensor, dst, group, tag))

    def irecv(
        self, tensor: Tensor, src: int, group: MpiGroup | None = None, tag: int = 0
    ) -> MpiWork:
        """Begins to receive a tensor."""
        return self._progress.begin(self._received(tensor, src, group, tag))

    def send(self, tensor: Tensor, dst: int, group: MpiGroup | None = None, tag: int = 0) -> None:
        """Sends a tensor."""
        self._sent(tensor, dst, group, tag).wait()

    def recv(self, tensor: Tensor, src: int, group: MpiGroup | None = None, tag: int = 0) -> None:
        """Receives a tensor."""
        self._received(tensor, src, group, tag).wait()

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: MpiGroup | None = None, async_op: bool = False
    ) -> MpiWork | None:
        """Reduces a tensor in place, in the order that the library chooses."""
        among, comm = self._members(group)
        kind, operation = self._reduction(tensor.dtype, op)
        least = tensor.nbytes // MOST_PIECES // SUM_PIECE_BYTES * SUM_PIECE_BYTES
        pieces = self._pieces(tensor, min(PIECE_BYTES, max(SUM_PIECE_BYTES, least)))
        width, own = tensor.element_size(), self._mpi.IN_PLACE
        terms = [(one, one.nbytes // width, kind) for one in pieces]
        with self._progress.lock:
            requests = [comm.Iallreduce(own, one, operation) for one in terms]
        return self._end(requests, [tensor], among, "a sum", async_op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: Any = SUM,
        group: MpiGroup | None = None,
        async_op: bool = False,
    ) -> MpiWork | None:
        """Reduces a tensor into that of a rank, and into all others' copies: as quickly."""
        return self.all_reduce(tensor, op, group, async_op)

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        tensor: Tensor,
        group: MpiGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fills a tensor for each rank: those of one size as one call, others by messages."""
        size = tensor.nbytes
        is_even = all(one.nbytes == size for one in outputs)
        if not is_even or size * len(outputs) > PIECE_BYTES:
            return super().all_gather(outputs, tensor, group, async_op)
        among, comm = self._members(group)
        row = row_of(outputs)  # of this rank: those of others may lie otherwise
        target = tensor.new_empty(tensor.numel() * len(outputs)) if row is None else row
        [source], [whole], byte = self._pieces(tensor), self._pieces(target), self._mpi.BYTE
        with self._progress.lock:
            requests = [comm.Iallgather((source, size, byte), (whole, size, byte))]
        if row is not None:
            return self._end(requests, [tensor, target], among, "a gather", async_op)
        work: Any = self._end(requests, [tensor, target], among, "a gather", True)

        def split() -> None:
            for one, part in zip(outputs, target.chunk(len(outputs)), strict=True):
                one.view(-1).copy_(part)

        return finished(JoinedWork([work], split if size else None), async_op)

    def broadcast(
        self, tensor: Tensor, src: int, group: MpiGroup | None = None, async_op: bool = False
    ) -> MpiWork | None:
        """Fills a tensor with that of a rank."""
        among, comm = self._members(group)
        root, pieces = among.place(src), self._pieces(tensor)
        with self._progress.lock:
            requests = [comm.Ibcast(piece, root) for piece in pieces]
        return self._end(requests, [tensor], among, "a broadcast", async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: Any = SUM,
        group: MpiGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces a tensor for each rank, and leaves on each its own."""
        sizes = {part.nbytes for part in inputs}
        if len(sizes) > 1 or sum(sizes) * len(inputs) > PIECE_BYTES:
            return super().reduce_scatter(output, inputs, op, group, async_op)
        among, comm = self._members(group)
        kind, operation = self._reduction(output.dtype, op)
        row = row_of(inputs)
        row = torch.cat([part.view(-1) for part in inputs]) if row is None else row
        [source], [target], count = self._pieces(row), self._pieces(output), output.numel()
        parts = (source, count, kind), (target, count, kind)  # counts are those of one rank
        with self._progress.lock:
            requests = [comm.Ireduce_scatter_block(*parts, operation)]
        return self._end(requests, [row, output], among, "a reduce-scatter", async_op)

    def barrier(self, group: MpiGroup | None = None, async_op: bool = False) -> MpiWork | None:
        """Waits for all ranks of a group."""
        among, comm = self._members(group)
        with self._progress.lock:
            requests = [comm.Ibarrier()]
        return self._end(requests, [], among, "a barrier", async_op)

    def _members(self, group: MpiGroup | None) -> tuple[MpiGroup, MPI.Intracomm]:
        among = self.members(group)
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

    def _pieces(self, tensor: Tensor, most: int = 0) -> list[MPI.buffer]:
        # Of a tensor without numbers one that is empty: it is a message nevertheless.
        most = most or PIECE_BYTES
        if tensor.nbytes <= most:
            return [self._buffer(tensor.data_ptr(), tensor.nbytes)]
        address, length = tensor.data_ptr(), tensor.nbytes
        begins = range(0, max(length, 1), most)
        return [self._buffer(address + one, min(most, length - one)) for one in begins]

    def _reduction(self, dtype: torch.dtype, op: Any) -> tuple[Any, Any]:
        key = dtype if op is SUM else (dtype, op)  # its hash takes longer than all else
        if key not in self._reductions:
            self._reductions[key] = reduction(self._mpi, dtype, op)
        return self._reductions[key]

    def _sent(self, tensor: Tensor, dst: int, group: MpiGroup | None, tag: int) -> MpiWork:
        among, comm, place, number = self._channel(dst, group, tag)
        with self._progress.lock:
            requests = [comm.Isend(piece, place, number) for piece in self._pieces(tensor)]
        what = "the answer of rank %d to tag %d", dst, tag
        return MpiWork(self._progress, requests, [tensor], among.timeout_s, what)

    def _received(self, tensor: Tensor, src: int, group: MpiGroup | None, tag: int) -> MpiWork:
        among, comm, place, number = self._channel(src, group, tag)
        pieces = self._pieces(tensor)
        with self._progress.lock:
            requests = [comm.Irecv(piece, place, number) for piece in pieces]
        what = "the message of rank %d with tag %d", src, tag
        return MpiWork(self._progress, requests, [tensor], among.timeout_s, what, pieces)

    def _end(
        self,
        requests: list[MPI.Request],
        tensors: Sequence[Tensor],
        among: MpiGroup,
        what: str,
        async_op: bool,
    ) -> MpiWork | None:
        work = MpiWork(self._progress, requests, tensors, among.timeout_s, what)
        if async_op:
            return self._progress.begin(work)
        work.wait()
        return None


@functools.cache
def reduction(mpi: Any, dtype: torch.dtype, op: Any) -> tuple[MPI.Datatype, MPI.Op]:
    """Returns what MPI calls the type and the operation."""
    is_ours = dtype in HALVES
    operation = _our_operation(mpi, dtype, op) if is_ours else getattr(mpi, REDUCTIONS[op])
    return getattr(mpi, TYPES[dtype]), operation


@functools.cache
def _our_operation(mpi: Any, dtype: torch.dtype, op: Any) -> MPI.Op:
    combine = COMBINE[op]

    def reduce(given: Any, result: Any, kind: Any) -> None:
        # MPI may call it with any part of the tensors, in the main thread or that of the progress.
        term, total = (torch.frombuffer(memory, dtype=dtype) for memory in (given, result))
        combine(term, total, out=total)

    created: MPI.Op = mpi.Op.Create(reduce, commute=True)
    return created
