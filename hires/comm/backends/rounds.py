"""Memory in which the ranks of a group exchange bytes of any length, round by round.

In a round each rank writes a piece into its slot and arrives; when all have, each reads from the
slots of the others. Two sets of slots are enough: a rank that writes in round k + 2 has met all in
round k + 1, so all have read what was written in round k.

    rank 0   write 1 | read 1 . write 2 | ....... read 2 . write 3 (slot of 1)
    rank 1   write 1 | read 1 ......... write 2 | read 2
                     all have met              all have met

    arrived[r]       rounds to which rank r has come
    given[2][r]      bytes that rank r gives in all to the operation of a round, and its kind
    slots[2][r]      its piece
    sums[2][r]       its share of a sum of pieces
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hires.comm.backends import counters
from hires.comm.backends.backend import reduce_in_order
from hires.comm.backends.counters import LINE, Counters, copy
from hires.core.errors import PeerError

SLOT_BYTES = 2**19
"""Longest piece: so long that to meet costs little, so short that it stays in a core's cache."""
ALL_SLOTS_BYTES = 2**24
"""Memory for the slots of one group."""
KINDS = 2**8
"""Kinds of operations that ranks tell apart, beside the bytes that each gives."""
WHOLE_BYTES = 2**14
"""Up to this size every rank sums all terms: to divide a sum among ranks needs another round."""


class Rounds:
    """The memory of some ranks, of :func:`num_bytes`, as the one at position ``index`` sees it.

    All its ranks call the same operations in one order; tensors are contiguous.
    """

    def __init__(
        self, memory: memoryview, ranks: Sequence[int], index: int, timeout_s: float, spins: int
    ) -> None:
        self._ranks, num_ranks = ranks, len(ranks)  # named in errors
        self._num_ranks, self._index, self._members = num_ranks, index, range(num_ranks)
        begin = counters.num_bytes(num_ranks, 3 * num_ranks)
        self._counters = Counters(memory[:begin], num_ranks, index, timeout_s, spins, ranks)
        self._slot_bytes = slot_bytes(num_ranks)
        self._share_bytes = self._slot_bytes // num_ranks
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=begin)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(memory, begin))
        self._sums = 2 * num_ranks * self._slot_bytes  # where they begin
        self._number = 0  # of the last round
        self.kind = 0
        """What the ranks must agree on in the operation that they come to, as a number."""
        self._terms: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._meet(self._number + 1)

    def share(self, given: Tensor | None, taken: Sequence[Tensor | None]) -> None:
        """Gives all ranks one tensor, or none, and fills ``taken[r]`` with that of rank ``r``."""
        source, total = (0, 0) if given is None else (given.data_ptr(), given.nbytes)
        wanted = [(r, t.data_ptr(), t.nbytes) for r, t in enumerate(taken) if t is not None]
        begin = most = 0
        while True:
            number, slots = self._next(total)
            if begin < total:
                size = min(total - begin, self._slot_bytes)
                copy(slots + self._index * self._slot_bytes, source + begin, size)
            self._meet(number)
            if begin == 0:
                most = self._most(number, [(rank, size) for rank, _, size in wanted])
            for rank, target, length in wanted:
                if begin < length:
                    size = min(length - begin, self._slot_bytes)
                    copy(target + begin, slots + rank * self._slot_bytes, size)
            begin += self._slot_bytes
            if begin >= most:
                return

    def reduce_scatter(self, output: Tensor, terms: Sequence[Tensor], op: Any) -> None:
        """Reduces one tensor for each rank, ``terms[r]``, into that rank's ``output``."""
        for rank, term in enumerate(terms):
            self.reduce(term, output if rank == self._index else None, op)

    def reduce(self, term: Tensor, output: Tensor | None, op: Any) -> None:
        """Reduces a tensor over all ranks into ``output``, perhaps the same; None: not here."""
        if term.nbytes <= WHOLE_BYTES:
            self._reduce_whole(term, output, op)
        else:
            self._reduce_pieces(term, output, op)

    def _reduce_whole(self, term: Tensor, output: Tensor | None, op: Any) -> None:
        size = term.nbytes
        number, slots = self._next(size)
        copy(slots + self._index * self._slot_bytes, term.data_ptr(), size)
        self._meet(number)
        self._most(number, [(rank, size) for rank in self._members])
        if output is not None and size:
            key = number % 2, size, term.dtype
            if key not in self._terms:
                if len(self._terms) > 64:
                    self._terms.clear()
                first = slots - self._begin
                self._terms[key] = self._views(first, self._slot_bytes, size, term.dtype)
            reduce_in_order(self._terms[key], op, output.view(-1))

    # In each round a piece is written, and the shares of the one before it are read:
    #
    #     write 0 | sum share of 0 . write 1 | sum share of 1 . read shares of 0 . write 2 | ...
    def _reduce_pieces(self, term: Tensor, output: Tensor | None, op: Any) -> None:
        source, total, most = term.data_ptr(), term.nbytes, self._slot_bytes
        target = 0 if output is None else output.data_ptr()
        for begin in range(0, total + most, most):
            number, slots = self._next(total)
            size, before = min(total - begin, most), min(total - begin + most, most)
            if size > 0:
                copy(slots + self._index * most, source + begin, size)
            self._meet(number)
            if begin == 0:
                self._most(number, [(rank, total) for rank in self._members])
            if size > 0:
                self._sum_share(number, slots - self._begin, size, term.dtype, op)
            for rank in self._members if target and begin else ():
                first, end = self._share_of(rank, before)
                place = self._begin + self._sum_place(number - 1, rank)
                copy(target + begin - most + first, place, end - first)

    def _sum_share(self, number: int, slots: int, size: int, dtype: torch.dtype, op: Any) -> None:
        first, end = self._share_of(self._index, size)
        if first < end:
            terms = self._views(slots + first, self._slot_bytes, end - first, dtype)
            place = self._sum_place(number, self._index)
            reduce_in_order(terms, op, self._bytes[place : place + end - first].view(dtype))

    def _share_of(self, rank: int, size: int) -> tuple[int, int]:
        # The bytes of a piece that a rank sums: whole lines.
        share = -(-size // self._num_ranks // LINE) * LINE
        return min(rank * share, size), min((rank + 1) * share, size)

    def _sum_place(self, number: int, rank: int) -> int:
        return self._sums + (number % 2 * self._num_ranks + rank) * self._share_bytes

    def _next(self, total: int) -> tuple[int, int]:
        # The number of the next round, and the address of its slots.
        number = self._number + 1
        place = (1 + number % 2) * self._num_ranks + self._index
        self._counters.values[place] = total * KINDS + self.kind
        return number, self._begin + number % 2 * self._num_ranks * self._slot_bytes

    def _meet(self, number: int) -> None:
        self._number = number
        self._counters.arrive(self._members, number)
        self._counters.meet(self._members, number)

    def _most(self, number: int, wanted: Sequence[tuple[int, int]]) -> int:
        # What the rank that gives most gives in all, when all have met.
        row = (1 + number % 2) * self._num_ranks
        words = [self._counters.values[row + rank] for rank in self._members]
        given = [word // KINDS for word in words]
        for rank, size in wanted:
            if given[rank] != size:
                raise PeerError(
                    f"rank {self._ranks[rank]} gives {given[rank]} bytes, and rank "
                    f"{self._ranks[self._index]} expects {size}: they are in different operations"
                )
        for rank, word in enumerate(words):
            if word % KINDS != self.kind:
                names = f"ranks {self._ranks[rank]} and {self._ranks[self._index]}"
                raise PeerError(
                    f"{names} are in operations of another name, type, reduction or root"
                )
        return max(given)

    def _views(self, first: int, step: int, size: int, dtype: torch.dtype) -> list[Tensor]:
        places = [first + rank * step for rank in self._members]
        return [self._bytes[place : place + size].view(dtype) for place in places]


def slot_bytes(num_ranks: int) -> int:
    """Returns the longest piece of a round: whole lines for each rank."""
    most = min(SLOT_BYTES, ALL_SLOTS_BYTES // (2 * num_ranks))
    return max(most // (LINE * num_ranks), 1) * LINE * num_ranks


def num_bytes(num_ranks: int) -> int:
    """Returns the size of a group's memory: counters, slots, sums."""
    slot = slot_bytes(num_ranks)
    begin = counters.num_bytes(num_ranks, 3 * num_ranks)
    return begin + 2 * num_ranks * (slot + slot // num_ranks)
