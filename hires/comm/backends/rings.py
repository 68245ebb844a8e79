"""Rings of cells in shared memory, one from each rank to each, in which short records pass.

    written[s][t]    cells that s has written for t               written by s only
    read[s][t]       cells from s that t has read                 written by t only
    cells[s][t][4]   record k from s to t, in cell k % 4: numbers, then bytes

A rank has two words to sleep on: one of the thread that waits for a message, one of its helper,
which answers while the rank computes (:mod:`hires.comm.backends.peer_messages`).

    the waiter's word    0: no thread waits    1: it sleeps    2: it looks again and again
    the helper's word    0: it is awake        1: it sleeps

A writer wakes the waiter if that sleeps. Only if no thread waits, and an answer is urgent, is
the helper woken. A thread that ends its wait stores 0 and looks once more after that, so a record
whose writer still saw it waiting is read.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from hires.comm.backends import counters
from hires.comm.backends.counters import LINE, Counters

CELLS = 4  # of a ring
CELL_BYTES = 2**18
ALL_CELLS_BYTES = 2**26
"""Memory for the cells of a world."""
_NUMBERS = 5  # of a record, in the line before the bytes
NONE, ASLEEP, LOOKING = 0, 1, 2
"""Values of the waiter's word."""


class Record(NamedTuple):
    """What lies in a cell."""

    kind: int
    number: int
    """Of the message, among the long ones of its sender."""
    size: int = 0
    key: int = 0
    tag: int = 0
    bytes_at: int = 0
    """Where the bytes of the cell lie in this rank's memory."""


class Rings:
    """The rings of some ranks, in a memory of :func:`num_bytes`, as rank ``index`` sees them."""

    def __init__(
        self, memory: memoryview, num_ranks: int, index: int, timeout_s: float, spins: int
    ) -> None:
        self.num_ranks, self.index = num_ranks, index
        begin = counters.num_bytes(2 * num_ranks, 2 * num_ranks**2)
        self.counters = Counters(
            memory[:begin], 2 * num_ranks, index, timeout_s, spins, range(num_ranks)
        )
        self.helper = num_ranks + index  # its word
        self._cell = cell_bytes(num_ranks)
        self.most = self._cell - LINE  # bytes of a record
        self._numbers = memory[begin:].cast("q")
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(memory, begin))
        self._written = [index * num_ranks + other for other in range(num_ranks)]
        self._read = [num_ranks**2 + other * num_ranks + index for other in range(num_ranks)]
        # Of this rank's own counters, which no other rank changes.
        self._sent, self._taken = [0] * num_ranks, [0] * num_ranks
        self._incoming = [
            (other * num_ranks + index, self._ring(other, index)) for other in range(num_ranks)
        ]
        self.others = [other for other in range(num_ranks) if other != index]
        self._places = [(self._incoming[other][0], other) for other in self.others]

    def has_room(self, target: int) -> bool:
        """Whether a record for a rank can be written now."""
        place = self.num_ranks**2 + self._written[target]
        if self._sent[target] - self.counters.values[place] < CELLS:
            return True
        self.counters.fence()  # its reader sees that the ring was full, or this rank sees the room
        return self._sent[target] - self.counters.values[place] < CELLS

    def cell(self, target: int) -> int:
        """Returns where the bytes of the next record for a rank belong."""
        number = self._sent[target] % CELLS
        return self._begin + self._ring(self.index, target) + number * self._cell + LINE

    def write(self, target: int, record: Record) -> None:
        """Writes a record, after its bytes; :meth:`wake` follows."""
        number = self._sent[target]
        at = (self._ring(self.index, target) + number % CELLS * self._cell) // 8
        numbers = self._numbers
        for place, value in enumerate(record[:_NUMBERS], at):
            numbers[place] = value
        self._sent[target] = self.counters.values[self._written[target]] = number + 1

    def wake(self, target: int, urgent: bool) -> None:
        """Wakes the thread of a rank that waits for messages, or else its helper if it must act."""
        words = self.counters.words
        self.counters.fence()
        state = words[target]
        if state == ASLEEP:
            self.counters.ring(target)
        elif state == NONE and urgent:
            self.counters.ring(self.num_ranks + target)

    def arrived(self) -> bool:
        """Whether a record waits to be read."""
        values, taken = self.counters.values, self._taken
        for place, other in self._places:  # noqa: SIM110, a generator takes twice as long
            if values[place] > taken[other]:
                return True
        return False

    def oldest(self, source: int) -> Record | None:
        """Returns the first record of a rank that was not dropped."""
        place, ring = self._incoming[source]
        taken = self._taken[source]
        if self.counters.values[place] <= taken:
            return None
        offset = ring + taken % CELLS * self._cell
        numbers = self._numbers[offset // 8 : offset // 8 + _NUMBERS].tolist()
        return Record._make([*numbers, self._begin + offset + LINE])

    def drop(self, source: int) -> None:
        """Frees the cell of the first record of a rank, and wakes that if it had none free."""
        self._taken[source] = number = self._taken[source] + 1
        self.counters.values[self._read[source]] = number
        self.counters.fence()
        was_full = self.counters.values[self._incoming[source][0]] - number + 1 >= CELLS
        if was_full:
            self.wake(source, urgent=True)

    def _ring(self, source: int, target: int) -> int:
        return (source * self.num_ranks + target) * CELLS * self._cell


def cell_bytes(num_ranks: int) -> int:
    """Returns the size of a cell: at least a line of numbers and one of bytes."""
    most = min(CELL_BYTES, ALL_CELLS_BYTES // (CELLS * num_ranks**2))
    return max(most // LINE, 2) * LINE


def num_bytes(num_ranks: int) -> int:
    """Returns the size of the memory of a world's rings."""
    begin = counters.num_bytes(2 * num_ranks, 2 * num_ranks**2)
    return begin + num_ranks**2 * CELLS * cell_bytes(num_ranks)
