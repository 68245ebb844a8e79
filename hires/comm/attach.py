"""Adds large tensors over ranks of one machine, each of which reads the others' memory.

A sum over TCP copies every byte four times and needs the transport's threads, for which busy ranks
leave no core. Here the kernel copies from one process into the other (Linux, ``process_vm_readv``;
where the system forbids that, the group sums over the transport). Every rank owns a share of the
numbers, whatever tensors they belong to:

    numbers        | share 0 | share 1 | share 2 |
    1  gather      all ranks give the addresses of their tensors
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

import ctypes
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 2**18  # bytes that are read and added at a time: they stay in the core's own cache
MAX_READ_BYTES = 2**30  # the kernel reads less than 2 GiB at a time
MAX_TENSORS = 4096  # addresses that fit a gather
PR_SET_PTRACER = 0x59616D61  # option of prctl: others may read this process where Yama restricts it
_MAGIC = 0x48495245  # a number that each rank prepares, plus its index, for the others to find

Gather = Callable[[Tensor], Tensor]
"""Stacks a small tensor of all ranks of the group; returns when all have arrived."""


class _Vector(ctypes.Structure):  # struct iovec: a piece of memory
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class PeerMemory:
    """The memory of a group's ranks, as one of them sees it; ``index`` is its position."""

    def __init__(self, gather: Gather, index: int) -> None:
        self._gather = gather
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
            self._sum(tensors[first : first + MAX_TENSORS])

    def _sum(self, tensors: list[Tensor]) -> None:
        addresses = self._gather(torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64))
        sizes = [tensor.numel() for tensor in tensors]
        flat = [tensor.view(-1) for tensor in tensors]
        num_ranks, width = len(self._pids), tensors[0].element_size()
        scratch = [flat[0].new_empty(CHUNK_BYTES // width) for _ in range(num_ranks - 1)]
        for tensor, first, end in _pieces(sizes, num_ranks, self._index, CHUNK_BYTES // width):
            own = flat[tensor][first:end]
            terms, free = [own] * num_ranks, iter(scratch)
            for rank, pid in enumerate(self._pids):
                if rank != self._index:
                    terms[rank] = next(free)[: own.numel()]
                    self._fetch(terms[rank], pid, int(addresses[rank, tensor]) + first * width)
            _add_up(terms, own)
        self._gather(self._secret)  # a barrier: all shares are finished
        for rank, pid in enumerate(self._pids):
            pieces = _pieces(sizes, num_ranks, rank, MAX_READ_BYTES // width)
            for tensor, first, end in pieces if rank != self._index else ():
                start = int(addresses[rank, tensor]) + first * width
                self._fetch(flat[tensor][first:end], pid, start)
        self._gather(self._secret)  # a barrier: no rank reads any more

    def _reaches(self, places: Tensor) -> bool:
        # Each rank reads the number that every other one has prepared: the call may exist and be
        # forbidden (containers, Yama), or process ids may be of another namespace.
        def reads(rank: int, pid: int, address: int) -> bool:
            word = torch.zeros(1, dtype=torch.int64)
            got = self._read is not None and self._read(word, pid, address) == word.nbytes
            return got and word.item() == _MAGIC + rank

        return all(reads(rank, *place) for rank, place in enumerate(places.tolist()))

    def _fetch(self, target: Tensor, pid: int, address: int) -> None:
        assert self._read is not None
        if self._read(target, pid, address) != target.nbytes:
            code = ctypes.get_errno()
            raise OSError(code, f"reading the memory of process {pid}: {os.strerror(code)}")


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


def _add_up(terms: list[Tensor], own: Tensor) -> None:
    # In the order of ranks, so that all get the same bits; ``own`` is a term and takes the sum.
    total = terms[0] if terms[0] is not own else terms[0].clone() if len(terms) > 2 else own
    for term in terms[1:]:
        total = torch.add(total, term, out=own if term is terms[-1] else total)


def _reader() -> Callable[[Tensor, int, int], int] | None:
    # (tensor, process, address) -> bytes read, or -1; None where the system has no such call.
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return None
    call.restype = ctypes.c_ssize_t

    def read(target: Tensor, pid: int, address: int) -> int:
        here, there = _Vector(target.data_ptr(), target.nbytes), _Vector(address, target.nbytes)
        return int(call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))

    return read
