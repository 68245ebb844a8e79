"""Exchanges small messages between ranks of one machine through shared memory, in microseconds.

Tiles exchange statistics and borders hundreds of times a step, and wait for each other every time.
Over TCP a busy machine takes a millisecond for each, since the transport's thread must first get a
core. Here the members of a group map one file in memory (``memory_files``):

    arrived[r]       number of the last gather that rank r has written, and   written by r only
                     beside it the bytes of gathers k % 2
    written[s][t]    messages that s has written for t                        written by s only
    read[s][t]       messages from s that t has read                          written by t only
    gathers[2][r]    tensor that rank r gives to gather k, in slot k % 2
    mail[s][t][2]    message k from s to t, in slot k % 2
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from torch import Tensor

from hires.comm.backends import counters
from hires.comm.backends.counters import Counters
from hires.comm.backends.host_memory import copy
from hires.core.errors import PeerError
from hires.core.ranks.mailbox_limits import GATHER_BYTES, SLOTS


class SharedMemory:
    """The memory of a group of ``ranks`` as the one at position ``index`` sees it.

    ``memory`` holds :func:`num_bytes` zeros at first. ``mail_bytes`` is the largest message between
    two members; 0: there is room for gathers only. ``spins``: how long a wait looks before it
    sleeps (``counters.spins_for``).
    """

    def __init__(
        self,
        memory: memoryview,
        ranks: Sequence[int],
        index: int,
        timeout_s: float,
        mail_bytes: int,
        spins: int = counters.SPINS,
    ) -> None:
        self.mail_bytes = mail_bytes
        self._num_ranks, self._index, self._ranks = len(ranks), index, ranks
        num_ranks = len(ranks)
        split = counters.num_bytes(num_ranks, _num_counters(num_ranks))
        self._counters = Counters(memory[:split], num_ranks, index, timeout_s, spins, ranks)
        self._arrived = range(num_ranks)  # then [source][target], written and read
        self._written, self._read = num_ranks, num_ranks + num_ranks**2
        self._gathers = ctypes.addressof(ctypes.c_char.from_buffer(memory, split))
        self._mail = self._gathers + 2 * num_ranks * GATHER_BYTES
        self._num_gathers = 0
        self._sent, self._expected = [0] * num_ranks, [0] * num_ranks

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked in their order.

        CommError: a rank did not come, or gives another number of bytes; all ranks raise that one.
        """
        # Two slots are enough: a rank that writes gather k + 2 has seen all members in gather
        # k + 1, so all have read k, and no slot is overwritten unread.
        #
        #   rank 0   write 1 . read 1   write 2 ............ read 2   write 3 (slot of 1)
        #   rank 1   write 1 ......... read 1   write 2 . read 2
        self._num_gathers = number = self._num_gathers + 1
        slots, size = self._gathers + number % 2 * self._num_ranks * GATHER_BYTES, tensor.nbytes
        given = tensor.contiguous()
        copy(slots + self._index * GATHER_BYTES, given.data_ptr(), size)
        self._counters.note(self._index, number, size)
        self._counters.arrive(self._arrived, number)
        self._counters.meet(self._arrived, number, "a gather")
        sizes = [self._counters.noted(member, number) for member in self._arrived]
        for rank, num_bytes in zip(self._ranks, sizes, strict=True):
            if num_bytes != sizes[0]:
                raise PeerError(
                    f"rank {rank} gathers {num_bytes} bytes where rank {self._ranks[0]} gathers "
                    f"{sizes[0]}"
                )
        gathered = given.new_empty((self._num_ranks, *given.shape))
        place = gathered.data_ptr()
        for member in self._arrived:
            copy(place + member * size, slots + member * GATHER_BYTES, size)
        return gathered

    # Message k from s to t:
    #
    #   s:  wait until read[s][t] >= k - 2     mail[s][t][k % 2] = data     written[s][t] = k
    #   t:  wait until written[s][t] >= k      buffer = mail[s][t][k % 2]   read[s][t] = k
    #
    # With two slots a sender runs ahead by two messages; the third waits until the first was read.
    # ``hires.plan.proof.step_order`` proves for every plan that this wait ends.
    def send(self, tensor: Tensor, target: int) -> None:
        """Writes a message for a member; waits only while two earlier ones are unread."""
        self._sent[target] = number = self._sent[target] + 1
        pair, given = self._index * self._num_ranks + target, tensor.contiguous()
        self._counters.wait(self._read + pair, number - SLOTS, "rank %d to read", target)
        copy(self._slot(pair, number), given.data_ptr(), given.nbytes)
        self._counters.values[self._written + pair] = number
        self._counters.wake(target)

    def expect(self, buffer: Tensor, source: int) -> Callable[[], None]:
        """Returns a function that waits for a member's next message; call these in this order."""
        self._expected[source] = number = self._expected[source] + 1
        pair = source * self._num_ranks + self._index

        def receive() -> None:
            self._counters.wait(self._written + pair, number, "a message of rank %d", source)
            assert self._counters.values[self._read + pair] == number - 1, (
                "messages read out of order"
            )
            dense = buffer if buffer.is_contiguous() else buffer.new_empty(buffer.shape)
            copy(dense.data_ptr(), self._slot(pair, number), dense.nbytes)
            if dense is not buffer:
                buffer.copy_(dense)
            self._counters.values[self._read + pair] = number
            self._counters.wake(source)

        return receive

    def _slot(self, pair: int, number: int) -> int:
        return self._mail + (pair * SLOTS + number % SLOTS) * self.mail_bytes


def num_bytes(num_ranks: int, mail_bytes: int) -> int:
    """Returns the size of a group's memory: counters, slots of gathers, slots of messages."""
    begin = counters.num_bytes(num_ranks, _num_counters(num_ranks))
    return begin + 2 * num_ranks * GATHER_BYTES + SLOTS * num_ranks**2 * mail_bytes


def _num_counters(num_ranks: int) -> int:
    return num_ranks * (1 + 2 * num_ranks)
