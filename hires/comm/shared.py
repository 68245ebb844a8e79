"""How do ranks of one machine exchange small messages in microseconds? Through shared memory.

Tiles exchange statistics and borders hundreds of times a step, and wait for each other every time.
Over TCP a busy machine answers in a millisecond, since the transport's thread must first get a
core. Here a rank writes into memory that all members see, and looks at counters until others have.
Two slots for each way, used in turns, are enough: a third message waits until the first is read.
``hires.plan.proof.mailboxes`` proves for every plan that no rank waits so for ever.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hires.core.errors import CommError
from hires.core.ranks import mailbox_limits as limits
from hires.core.ranks.mailbox_limits import LINE, SLOTS

GATHER_BYTES = 65536
"""Largest tensor that a rank gives to a gather."""
SPINS = 2000
"""Looks before a waiting rank begins to give its core away between them."""
FOLDER = Path("/dev/shm")
"""Memory in the guise of a folder."""


class SharedMemory:
    """One rank's view of the memory of its group.

    Args:
        path: the file that one member created; it may be deleted once all members have opened it.
        num_ranks: members.
        index: this rank's position among them.
        timeout_s: longest wait for another member.
        mail: whether there is room for messages between two members.
    """

    def __init__(
        self, path: Path, num_ranks: int, index: int, timeout_s: float, mail: bool = True
    ) -> None:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), num_bytes(num_ranks, mail))
        self.mail_bytes = mail_bytes(num_ranks, mail)
        num_counters = num_ranks * (1 + 2 * num_ranks)
        counters = np.frombuffer(memory, np.int64, num_counters * LINE // 8)[:: LINE // 8]
        self._came = counters[:num_ranks]
        pairs = counters[num_ranks:].reshape(2, num_ranks, num_ranks)
        self._written, self._read = pairs[0], pairs[1]  # [source, target]
        rest = torch.frombuffer(memory, dtype=torch.uint8, offset=num_counters * LINE)
        split = 2 * num_ranks * GATHER_BYTES
        self._gathers = rest[:split].view(2, num_ranks, GATHER_BYTES)
        self._mail = rest[split:].view(num_ranks, num_ranks, SLOTS, self.mail_bytes)
        self._index = index
        self._timeout_s = timeout_s
        self._num_gathers = 0
        self._sent = [0] * num_ranks
        self._expected = [0] * num_ranks

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked in their order.

        A rank is never more than one gather ahead of another, so no slot is overwritten unread:
        who writes gather k + 2 has seen everybody in gather k + 1, hence finished with k.

        Raises:
            CommError: a member did not come in time.
        """
        self._num_gathers = number = self._num_gathers + 1
        slots = self._gathers[number % 2]
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        slots[self._index, : flat.numel()] = flat
        self._came[self._index] = number
        self._wait(lambda: self._came.min() >= number, "a gather")
        gathered = slots[:, : flat.numel()].contiguous()
        return gathered.view(tensor.dtype).view(len(self._came), *tensor.shape)

    def send(self, tensor: Tensor, target: int) -> None:
        """Writes a message for a member; waits only while two older ones lie unread.

        Raises:
            CommError: the member did not read them in time.
        """
        self._sent[target] = number = self._sent[target] + 1
        read = self._read[self._index]
        self._wait(lambda: read[target] >= number - SLOTS, f"member {target} to read")
        self._slot(self._index, target, number, tensor).copy_(tensor)
        self._written[self._index, target] = number

    def expect(self, buffer: Tensor, source: int) -> Callable[[], None]:
        """Returns what waits for the next message of a member and puts it into ``buffer``.

        Messages are to be waited for in the order in which they were expected.
        """
        self._expected[source] = number = self._expected[source] + 1

        def receive() -> None:
            written = self._written[:, self._index]
            self._wait(lambda: written[source] >= number, f"a message of member {source}")
            assert self._read[source, self._index] == number - 1, "messages read out of order"
            buffer.copy_(self._slot(source, self._index, number, buffer))
            self._read[source, self._index] = number

        return receive

    def _slot(self, source: int, target: int, number: int, like: Tensor) -> Tensor:
        """Returns the memory of a message, in another tensor's shape and type."""
        size = like.numel() * like.element_size()
        return self._mail[source, target, number % SLOTS, :size].view(like.dtype).view(like.shape)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Returns when something has happened."""
        looks, begin_s = 0, 0.0
        while not done():
            looks += 1
            if looks < SPINS:
                continue
            # Somebody is late: perhaps because this rank keeps the core that the other one needs.
            os.sched_yield()
            if looks == SPINS:
                begin_s = time.monotonic()
            elif looks > 4 * SPINS:
                time.sleep(1e-4)
            if time.monotonic() - begin_s > self._timeout_s:
                late = [i for i, count in enumerate(self._came) if count < self._num_gathers]
                behind = f"; members {late} are behind" if late else ""
                raise CommError(f"waiting for {what} took over {self._timeout_s:g} s{behind}")


def supported() -> bool:
    """Whether this machine keeps the order of writes as other cores see them."""
    return platform.machine() in ("x86_64", "AMD64")


def mail_bytes(num_ranks: int, mail: bool = True) -> int:
    """Returns the largest message between two members of a group; 0 without ``mail``."""
    return limits.mail_bytes(num_ranks) if mail else 0


def num_bytes(num_ranks: int, mail: bool = True) -> int:
    """Returns the size of a group's memory: counters, slots of gathers, slots of messages."""
    counters = num_ranks * (1 + 2 * num_ranks) * LINE
    letters = SLOTS * num_ranks * num_ranks * mail_bytes(num_ranks, mail)
    return counters + 2 * num_ranks * GATHER_BYTES + letters


def create(num_ranks: int, mail: bool = True) -> Path | None:
    """Returns a new file for a group, or None if there is no room; only its owner can read it."""
    folder = FOLDER if FOLDER.is_dir() else Path(tempfile.gettempdir())
    path = None
    try:
        handle, name = tempfile.mkstemp(prefix="hires-", dir=folder)
        os.close(handle)
        path = Path(name)
        # Written, not only sized: a full memory disk says so here and not by a signal later.
        path.write_bytes(bytes(num_bytes(num_ranks, mail)))
    except OSError:
        if path is not None:
            path.unlink(missing_ok=True)
        return None
    return path


def remove(path: Path) -> None:
    """Deletes the file; the memory stays until the last member ends."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
