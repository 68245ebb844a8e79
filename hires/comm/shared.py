"""Exchanges small messages between ranks of one machine through shared memory, in microseconds.

Tiles exchange statistics and borders hundreds of times a step, and wait for each other every time.
Over TCP a busy machine takes a millisecond for each, since the transport's thread must first get a
core. Here the members of a group map one file in memory (``memory_files``):

    arrived[r]       number of the last gather that rank r has written        written by r only
    written[s][t]    messages that s has written for t                        written by s only
    read[s][t]       messages from s that t has read                          written by t only
    gathers[2][r]    tensor that rank r gives to gather k, in slot k % 2
    mail[s][t][2]    message k from s to t, in slot k % 2

Each counter has a cache line of its own and one writer, so no lock is needed. The data is written
before its counter, and x86 shows other cores the writes in this order.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hires.comm.attach import PeerMemory
from hires.core.errors import CommError
from hires.core.ranks.mailbox_limits import LINE, SLOTS

GATHER_BYTES = 65536  # largest tensor that a rank gives to a gather
SPINS = 2000  # polls of a counter before a waiting rank yields its core between them


class SharedMemory:
    """The memory of a group as its rank at position ``index`` sees it.

    One member creates the file; it may be deleted once all have opened it. ``mail_bytes`` is the
    largest message between two members; 0: there is room for gathers only.
    """

    def __init__(
        self, path: Path, num_ranks: int, index: int, timeout_s: float, mail_bytes: int
    ) -> None:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), num_bytes(num_ranks, mail_bytes))
        self.mail_bytes = mail_bytes
        num_counters = num_ranks * (1 + 2 * num_ranks)
        counters = np.frombuffer(memory, np.int64, num_counters * LINE // 8)[:: LINE // 8]
        self._arrived = counters[:num_ranks]
        pairs = counters[num_ranks:].reshape(2, num_ranks, num_ranks)
        self._written, self._read = pairs[0], pairs[1]  # [source, target]
        rest = torch.frombuffer(memory, dtype=torch.uint8, offset=num_counters * LINE)
        split = 2 * num_ranks * GATHER_BYTES
        self._gathers = rest[:split].view(2, num_ranks, GATHER_BYTES)
        self._mail = rest[split:].view(num_ranks, num_ranks, SLOTS, self.mail_bytes)
        self._index, self._timeout_s = index, timeout_s
        self._num_gathers = 0
        self._sent, self._expected = [0] * num_ranks, [0] * num_ranks

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked in their order; CommError: one did not come."""
        # Two slots are enough: a rank that writes gather k + 2 has seen all members in gather
        # k + 1, so all have read k, and no slot is overwritten unread.
        #
        #   rank 0   write 1 . read 1   write 2 ............ read 2   write 3 (slot of 1)
        #   rank 1   write 1 ......... read 1   write 2 . read 2
        self._num_gathers = number = self._num_gathers + 1
        slots = self._gathers[number % 2]
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        slots[self._index, : flat.numel()] = flat
        self._arrived[self._index] = number
        self._wait(lambda: self._arrived.min() >= number, "a gather")
        gathered = slots[:, : flat.numel()].contiguous()
        return gathered.view(tensor.dtype).view(len(self._arrived), *tensor.shape)

    # Message k from s to t:
    #
    #   s:  wait until read[s][t] >= k - 2     mail[s][t][k % 2] = data     written[s][t] = k
    #   t:  wait until written[s][t] >= k      buffer = mail[s][t][k % 2]   read[s][t] = k
    #
    # With two slots a sender runs ahead by two messages; the third waits until the first was read.
    # ``hires.plan.proof.machine`` proves for every plan that this wait ends.
    def send(self, tensor: Tensor, target: int) -> None:
        """Writes a message for a member; waits only while two earlier ones are unread."""
        self._sent[target] = number = self._sent[target] + 1
        read = self._read[self._index]
        self._wait(lambda: read[target] >= number - SLOTS, f"member {target} to read")
        self._slot(self._index, target, number, tensor).copy_(tensor)
        self._written[self._index, target] = number

    def expect(self, buffer: Tensor, source: int) -> Callable[[], None]:
        """Returns a function that waits for a member's next message; call these in this order."""
        self._expected[source] = number = self._expected[source] + 1

        def receive() -> None:
            written = self._written[:, self._index]
            self._wait(lambda: written[source] >= number, f"a message of member {source}")
            assert self._read[source, self._index] == number - 1, "messages read out of order"
            buffer.copy_(self._slot(source, self._index, number, buffer))
            self._read[source, self._index] = number

        return receive

    def peers(self) -> PeerMemory | None:
        """Returns the members' own memory; None where they may not read each other's."""
        peers = PeerMemory(self.gather, self._index)
        return peers if peers.works else None

    def _slot(self, source: int, target: int, number: int, like: Tensor) -> Tensor:
        slot = self._mail[source, target, number % SLOTS, : like.nbytes]
        return slot.view(like.dtype).view(like.shape)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        polls, begin_s = 0, 0.0
        while not done():
            polls += 1
            if polls < SPINS:
                continue
            # First poll, then yield: the other member may need the core that this rank occupies.
            # After that sleep, so that a rank that waits for minutes leaves the core to others.
            os.sched_yield()
            if polls == SPINS:
                begin_s = time.monotonic()
            elif polls > 4 * SPINS:
                time.sleep(1e-4)
            if time.monotonic() - begin_s > self._timeout_s:
                late = [i for i, count in enumerate(self._arrived) if count < self._num_gathers]
                behind = f"; members {late} are behind" if late else ""
                raise CommError(f"waiting for {what} took over {self._timeout_s:g} s{behind}")


def supported() -> bool:
    """Whether other cores of this machine see writes in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64")


def num_bytes(num_ranks: int, mail_bytes: int) -> int:
    """Returns the size of a group's memory: counters, slots of gathers, slots of messages."""
    counters = num_ranks * (1 + 2 * num_ranks) * LINE
    return counters + 2 * num_ranks * GATHER_BYTES + SLOTS * num_ranks**2 * mail_bytes
