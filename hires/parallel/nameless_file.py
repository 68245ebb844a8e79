"""Writes tensors to a file that has no name, and reads them again.

The system frees such a file with the process, however that ends: nothing is left of it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class NamelessFile:
    """A file in a folder, which is made if it is not there. All methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd, name = tempfile.mkstemp(prefix="hires-", dir=folder)
        self.close = weakref.finalize(self, os.close, self._fd)
        Path(name).unlink()

    def reserve(self, num_bytes: int) -> None:
        """Takes so much of the disk, so that no later write finds it full."""
        os.posix_fallocate(self._fd, 0, num_bytes)

    def write(self, data: Tensor, place: int) -> None:
        """Writes a dense tensor, in the order of its memory, from a byte of the file on."""
        self._transfer(os.pwrite, data, place)

    def read(self, data: Tensor, place: int) -> None:
        """Fills a dense tensor."""
        self._transfer(_read_into, data, place)

    def _transfer(
        self, call: Callable[[int, memoryview, int], int], data: Tensor, place: int
    ) -> None:
        numbers: Any = data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy()
        left, done = memoryview(numbers), 0
        while done < len(left):
            moved = call(self._fd, left[done:], place + done)
            if not moved:
                raise OSError(f"the file ends at {place + done}")
            done += moved


def _read_into(fd: int, part: memoryview, place: int) -> int:
    return os.preadv(fd, [part], place)
