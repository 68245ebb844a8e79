"""Adds large tensors over ranks of one machine, each of which reads the others' memory.

A sum over TCP copies every byte four times and needs the transport's threads, for which busy ranks
leave no core. Here the kernel copies from one process into the other (Linux, ``process_vm_readv``;
where the system forbids that, the group sums over the transport). Every rank owns a share of the
numbers, whatever tensors they belong to:

    numbers        | share 0 | share 1 | share 2 |
    1  gather      all ranks give the addresses and sizes of their tensors
    2  reduce      rank 1 reads share 1 of ranks 0 and 2 and adds them up in the order of ranks, so
                   that all ranks get the same bits
    3  gather      all shares are finished
    4  copy        rank 1 reads share 0 from rank 0 and share 2 from rank 2
    5  gather      all reads are finished: the tensors may change again

Source:
    Jin et al., "LiMIC: support for high-performance MPI intra-node communication on Linux cluster",
    ICPP 2005, and the cross memory attach of today's MPI libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends.local_sums import reduce_in_order
from hires.core.errors import PeerError
from hires.core.ranks.mailbox_limits import GATHER_BYTES

CHUNK_BYTES = 2**18  # bytes that are read and added at a time: they stay in the core's own cache
MAX_READ_BYTES = 2**30  # the kernel reads less than 2 GiB at a time
MAX_TENSORS = (GATHER_BYTES // 8 - 2) // 2  # addresses and sizes that fit a gather
PR_SET_PTRACER = 0x59616D61  # option of prctl: others may read this process where Yama restricts it
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_REDUCE, _REDUCE_PARTS, _READ_PARTS = range(1, 4)
_CALLS = {_REDUCE: "reduces", _REDUCE_PARTS: "reduces parts of", _READ_PARTS: "reads parts of"}
_SUM = dist.ReduceOp.SUM
_MAGIC = 0x48495245  # a number that each rank prepares, plus its index, for the others to find

Gather = Callable[[Tensor], Tensor]
"""Stacks a small tensor of all ranks of the group; returns when all have arrived."""


class _Vector(ctypes.Structure):  # struct iovec: a piece of memory
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class PeerMemory:
    """The memory of a group's ``ranks``, as the one at position ``index`` sees it."""

    def __init__(self, gather: Gather, index: int, ranks: Sequence[int]) -> None:
        self._gather, self._ranks = gather, ranks
        self._index = index
        self._read = _reader()
        if sys.platform == "linux":  # other processes of the same user may read this one
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)
        self._secret = torch.tensor([_MAGIC + index], dtype=torch.int64)
        places = gather(torch.tensor([os.getpid(), self._secret.data_ptr()], dtype=torch.int64))
        self._pids = places[:, 0].tolist()
        self.works = bool(gather(torch.tensor([self._reaches(places)])).all())

    def sum(self, tensors: list[Tensor]) -> None:
        """Sums dense tensors of one type over the group, in place; OSError: a member has died."""
        for first in range(0, len(tensors), MAX_TENSORS):
            self.reduce(tensors[first : first + MAX_TENSORS], total=len(tensors))

    def reduce(
        self, tensors: list[Tensor], op: Any = _SUM, takes: bool = True, total: int = 0
    ) -> None:
        """Reduces up to ``MAX_TENSORS`` tensors, of ``total`` in all.

        ``takes``: this rank needs the result. PeerError: the ranks call different operations, or
        give different numbers of tensors, or tensors of different sizes.
        """
        addresses = self._addresses(tensors, _REDUCE, total)
        sizes = [tensor.numel() for tensor in tensors]
        flat = [tensor.view(-1) for tensor in tensors]
        num_ranks, width = len(self._pids), tensors[0].element_size()
        most = CHUNK_BYTES // width
        scratch = [flat[0].new_empty(most) for _ in range(num_ranks - 1)]
        for tensor, first, end in _pieces(sizes, num_ranks, self._index, most):
            column = (addresses[:, tensor] + first * width).tolist()
            self._reduce_piece(flat[tensor][first:end], column, scratch, op)
        self._gather(self._secret)  # a barrier: all shares are finished
        for rank in range(num_ranks) if takes else ():
            pieces = _pieces(sizes, num_ranks, rank, MAX_READ_BYTES // width)
            for tensor, first, end in pieces if rank != self._index else ():
                there = int(addresses[rank, tensor]) + first * width
                here = flat[tensor].data_ptr() + first * width
                self.read(rank, here, there, (end - first) * width)
        self._gather(self._secret)  # a barrier: no rank reads any more

    def reduce_parts(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Sums flat tensors of one type over the group, on each member only its own ``parts``."""
        addresses = self._addresses([tensor for one in parts for tensor in one], _REDUCE_PARTS)
        first = sum(map(len, parts[: self._index]))
        for number, tensor in enumerate(parts[self._index], first):
            self.reduce_from(tensor, tensor, addresses[:, number].tolist(), _SUM)
        self._gather(self._secret)  # a barrier: all have read what they sum

    def read_parts(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Fills the ``parts`` of the other members with theirs."""
        addresses = self._addresses([tensor for one in parts for tensor in one], _READ_PARTS)
        number = 0
        for rank, own in enumerate(parts):
            for tensor in own:
                if rank != self._index:
                    there = int(addresses[rank, number])
                    self.read(rank, tensor.data_ptr(), there, tensor.nbytes)
                number += 1
        self._gather(self._secret)  # a barrier: no rank reads any more

    def reduce_from(self, own: Tensor, output: Tensor, addresses: list[int], op: Any) -> None:
        """Reduces ``own`` and a tensor like it at an address in each other rank into ``output``."""
        num_ranks, width = len(self._pids), output.element_size()
        scratch = [own.new_empty(CHUNK_BYTES // width) for _ in range(num_ranks - 1)]
        for _, first, end in _pieces([own.numel()], 1, 0, CHUNK_BYTES // width):
            column = [address + first * width for address in addresses]
            piece = output[first:end]
            self._reduce_piece(piece, column, scratch, op, own[first:end])

    def _addresses(self, tensors: Sequence[Tensor], call: int, total: int = 0) -> Tensor:
        # Of each tensor on each rank; also a barrier: the tensors of all are there.
        header = [call, total or len(tensors)]
        splits = [
            tensors[at : at + MAX_TENSORS] for at in range(0, max(len(tensors), 1), MAX_TENSORS)
        ]
        return torch.cat([self._some_addresses(some, header) for some in splits], dim=1)

    def _some_addresses(self, tensors: Sequence[Tensor], header: list[int]) -> Tensor:
        # Once all ranks have called the same with as many tensors, of the same sizes.
        places = [word for one in tensors for word in (one.data_ptr(), one.nbytes)]
        given = self._gather(torch.tensor([*header, *places], dtype=torch.int64))
        headers, sizes = given[:, :2].tolist(), given[:, 3::2]
        names = [f"rank {rank}" for rank in self._ranks]
        verb = _CALLS[header[0]].split()[0]
        for place, (call, count) in enumerate(headers):
            if headers[place] != headers[0]:
                here, there = _words_of(call, count), _words_of(*headers[0])
                raise PeerError(f"{names[place]} {here} where {names[0]} {there}")
            for number in (sizes[place] != sizes[0]).nonzero().flatten().tolist()[:1]:
                width, first = sizes[place, number].item(), sizes[0, number].item()
                raise PeerError(
                    f"{names[place]} {verb} {width} bytes where {names[0]} {verb} {first}: "
                    f"tensor {number + 1} of {count}"
                )
        return given[:, 2::2]

    def _reduce_piece(
        self,
        output: Tensor,
        addresses: list[int],
        scratch: list[Tensor],
        op: Any,
        own: Tensor | None = None,
    ) -> None:
        terms, free = [output if own is None else own] * len(addresses), iter(scratch)
        for rank, address in enumerate(addresses):
            if rank != self._index:
                terms[rank] = next(free)[: output.numel()]
                self.read(rank, terms[rank].data_ptr(), address, output.nbytes)
        reduce_in_order(terms, op, output)

    def read(self, rank: int, here: int, there: int, num_bytes: int) -> None:
        """Copies bytes from an address of a rank to one of this process; OSError: it cannot."""
        assert self._read is not None
        for done in range(0, num_bytes, MAX_READ_BYTES):
            size = min(num_bytes - done, MAX_READ_BYTES)
            if self._read(here + done, self._pids[rank], there + done, size) != size:
                code = ctypes.get_errno()
                why = os.strerror(code) if code else "only in part"
                owner = f"rank {self._ranks[rank]} (process {self._pids[rank]})"
                raise OSError(code, f"reading the memory of {owner}: {why}")

    def _reaches(self, places: Tensor) -> bool:
        # Each rank reads the number that every other one has prepared: the call may exist and be
        # forbidden (containers, Yama), or process ids may be of another namespace.
        def reads(rank: int, pid: int, address: int) -> bool:
            word = torch.zeros(1, dtype=torch.int64)
            size = word.nbytes
            got = self._read is not None and self._read(word.data_ptr(), pid, address, size) == size
            return got and word.item() == _MAGIC + rank

        return all(reads(rank, *place) for rank, place in enumerate(places.tolist()))


def _words_of(call: int, count: int) -> str:
    return f"{_CALLS[call]} {count} tensors" if call in _CALLS else "calls another operation"


def _pieces(
    sizes: list[int], num_ranks: int, rank: int, most: int
) -> Iterator[tuple[int, int, int]]:
    # A rank's share of all numbers of some tensors, in pieces (tensor, first, end) of ``most``:
    #
    #     tensors     | a a a a a | b b | c c c c c c c c |
    #     shares      | rank 0 . . .  | rank 1 . . . . .  |
    total = sum(sizes)
    first, end = total * rank // num_ranks, total * (rank + 1) // num_ranks
    begin = 0
    for index, size in enumerate(sizes):
        low, high = max(first - begin, 0), min(end - begin, size)
        for start in range(low, high, most):
            yield index, start, min(start + most, high)
        begin += size


def is_allowed() -> bool:
    """Whether ranks of this machine may read each other's memory, as far as one process can see.

    The system has the call, lets this process use it, and does not keep it for the administrator.
    Ranks whose process numbers are of different name spaces cannot, which they see together alone.
    """
    read, word = _reader(), torch.ones(2, dtype=torch.int64)
    if read is None or read(word.data_ptr(), os.getpid(), word.data_ptr() + 8, 8) != 8:
        return False
    return _yama() <= 1 or os.geteuid() == 0


def refusal() -> str:
    """Returns why ranks may not read each other's memory here, and what would allow it."""
    if _reader() is None:
        return "this system has no process_vm_readv; use shm"
    if (scope := _yama()) > 1:
        return (
            f"{YAMA} is {scope}; set kernel.yama.ptrace_scope=1, or use shm, which needs no "
            f"permission"
        )
    return (
        "the system forbids process_vm_readv between the ranks; in a container allow it "
        "(--cap-add=SYS_PTRACE) and let them share process numbers (--pid), or use shm"
    )


def _yama() -> int:
    # From 2 on only the administrator reads other processes; 0 where the kernel has no such limit.
    with contextlib.suppress(OSError, ValueError):
        return int(YAMA.read_text())
    return 0


def _reader() -> Callable[[int, int, int, int], int] | None:
    # (address here, process, address there, bytes) -> bytes read, or -1; None: no such call.
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return None
    call.restype = ctypes.c_ssize_t

    def read(here: int, pid: int, there: int, size: int) -> int:
        own, other = _Vector(here, size), _Vector(there, size)
        return int(call(pid, ctypes.byref(own), 1, ctypes.byref(other), 1, 0))

    return read
