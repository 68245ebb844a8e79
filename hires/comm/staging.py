"""Copies tensors of a device through the host's memory, for what carries host memory only.

    device    tensor --copy--> pinned buffer --event--> the backend reads it      to send, to sum
    host                       pinned buffer <-- the backend fills it
    device    tensor <--copy-- pinned buffer            --event--> it is free     received, summed

Buffers are kept by type and size: the messages of a step are those of the step before, so a buffer
is allocated in the first step and used in all others. A copy to the device may still run when its
buffer is given back, so the next use of that buffer waits for the event behind the copy.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Shape and type -> a tensor of the host without numbers, from which the device copies fastest."""

MOST_SIZES = 1024
"""Sizes of which buffers are kept."""


def plain_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of the host without numbers."""
    return torch.empty(shape, dtype=dtype)


class Staging:
    """The host's buffers of a rank; ``reaches`` are the kinds of device that need none."""

    def __init__(self, reaches: Sequence[str], allocate: Allocate = plain_empty) -> None:
        self.reaches, self._allocate = frozenset(reaches), allocate
        self._free: dict[tuple[torch.dtype, int], collections.deque[tuple[Tensor, Any]]] = {}

    def of(self, tensors: Sequence[Tensor]) -> Staged | None:
        """Returns a buffer for dense tensors of one type; None: they are reached where they are."""
        return None if tensors[0].device.type in self.reaches else Staged(self, tensors)

    def take(self, dtype: torch.dtype, size: int) -> Tensor:
        """Returns a buffer without numbers."""
        free = self._free.get((dtype, size))
        if not free:
            return self._allocate([size], dtype)
        buffer, event = free.popleft()
        if event is not None:
            event.synchronize()
        return buffer

    def give_back(self, buffer: Tensor, event: Any = None) -> None:
        """Keeps a buffer for later; it is free behind an event of the device."""
        key = buffer.dtype, buffer.numel()
        if len(self._free) >= MOST_SIZES and key not in self._free:
            for _, last in [pair for pairs in self._free.values() for pair in pairs]:
                if last is not None:  # the device may still read the buffer
                    last.synchronize()
            self._free.clear()
        self._free.setdefault(key, collections.deque()).append((buffer, event))


class Staged:
    """A buffer of the host that stands for tensors of a device: ``host``, and its ``parts``."""

    def __init__(self, staging: Staging, tensors: Sequence[Tensor]) -> None:
        self._staging, self._tensors = staging, tensors
        self._device: Any = torch.get_device_module(tensors[0].device)
        sizes = [tensor.numel() for tensor in tensors]
        self.host = staging.take(tensors[0].dtype, sum(sizes))
        self.parts = [
            part.view(tensor.shape)
            for part, tensor in zip(torch.split(self.host, sizes), tensors, strict=True)
        ]

    def fetch(self) -> Staged:
        """Copies the tensors into the buffer; returns itself when they are there."""
        for part, tensor in zip(self.parts, self._tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        self._event().synchronize()
        return self

    def put(self) -> None:
        """Copies the buffer into the tensors, in the order of this thread's stream."""
        for part, tensor in zip(self.parts, self._tensors, strict=True):
            tensor.copy_(part, non_blocking=True)
        self._staging.give_back(self.host, self._event())

    def drop(self) -> None:
        """Gives the buffer back; the tensors stay as they are."""
        self._staging.give_back(self.host)

    def _event(self) -> Any:
        event = self._device.Event()
        event.record()
        return event
