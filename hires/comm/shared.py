"""How do ranks of one machine gather a few numbers in microseconds? Through memory that they share.

Tiles exchange statistics hundreds of times a step, and wait for each other every time. Over TCP a
busy machine answers in a millisecond, since the transport's thread must first get a core. Here each
rank writes its numbers into its slot and looks at the others' counters until they have come.

A rank is never more than one gather ahead of another, so two sets of slots, used in turns, are
enough: who writes gather k + 2 has seen everybody in gather k + 1, hence finished with k.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hires.core.errors import CommError

SLOT_BYTES = 65536
"""Largest tensor of one rank."""
LINE = 128
"""Bytes between two ranks' counters: each on cache lines of its own."""
SPINS = 2000
"""Looks before the waiting rank begins to give its core away between them."""
FOLDER = Path("/dev/shm")
"""Memory in the guise of a folder."""


def supported() -> bool:
    """Whether this machine keeps the order of writes as other cores see them."""
    return platform.machine() in ("x86_64", "AMD64")


def create(num_ranks: int) -> Path | None:
    """Returns a new file for a group, or None if there is no room; only its owner can read it."""
    folder = FOLDER if FOLDER.is_dir() else Path(tempfile.gettempdir())
    path = None
    try:
        handle, name = tempfile.mkstemp(prefix="hires-", dir=folder)
        os.close(handle)
        path = Path(name)
        # Written, not only sized: a full memory disk says so here and not by a signal later.
        path.write_bytes(bytes(_num_bytes(num_ranks)))
    except OSError:
        if path is not None:
            path.unlink(missing_ok=True)
        return None
    return path


class SharedGather:
    """One rank's view of the memory of its group.

    Args:
        path: the file that one member created; it may be deleted once all members have opened it.
        num_ranks: members.
        index: this rank's position among them.
        timeout_s: longest wait for the others.
    """

    def __init__(self, path: Path, num_ranks: int, index: int, timeout_s: float) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _num_bytes(num_ranks))
        counters = np.frombuffer(self._memory, np.int64, num_ranks * LINE // 8)
        self._counters = counters[:: LINE // 8]
        slots = torch.frombuffer(self._memory, dtype=torch.uint8, offset=num_ranks * LINE)
        self._slots = slots.view(2, num_ranks, SLOT_BYTES)
        self._index = index
        self._timeout_s = timeout_s
        self._count = 0

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked in their order.

        Raises:
            CommError: a rank did not come within ``timeout_s``.
        """
        self._count += 1
        slots = self._slots[self._count % 2]
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        slots[self._index, : flat.numel()] = flat
        self._counters[self._index] = self._count
        self._wait()
        gathered = slots[:, : flat.numel()].contiguous()
        return gathered.view(tensor.dtype).view(len(self._counters), *tensor.shape)

    def _wait(self) -> None:
        """Returns when all ranks have written this gather."""
        looks, begin_s = 0, 0.0
        while self._counters.min() < self._count:
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
                late = [i for i, count in enumerate(self._counters) if count < self._count]
                raise CommError(f"members {late} of the group did not come to a gather in time")


def remove(path: Path) -> None:
    """Deletes the file; the memory stays until the last member ends."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _num_bytes(num_ranks: int) -> int:
    """Returns the size of a group's memory: counters, then two sets of slots."""
    return num_ranks * (LINE + 2 * SLOT_BYTES)
