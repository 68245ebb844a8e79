"""Lets a thread that ends an operation on a device work in the streams of the operation's caller.

A stream of torch is current in one thread alone, so what the thread of a future queues, as the
copy back from the host or the wait for NCCL, would be seen by no stream of the caller:

    caller's stream    issue . compute ................ | event: what the caller queues next
    thread             waits for the library . copy back | event

Never run on a GPU: the tests use a stand-in for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class CallerStreams:
    """The streams of this thread on the devices of some tensors; none of tensors of the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.devices = [*dict.fromkeys(one.device for one in tensors if not one.is_cpu)]
        modules = {device: torch.get_device_module(device) for device in self.devices}
        self._streams = [
            (device, module, module.current_stream(device))
            for device, module in modules.items()
            if hasattr(module, "current_stream")
        ]
        self._events: list[tuple[Any, Any, Any]] = []

    @property
    def gpus(self) -> list[int | str | torch.device]:
        """The devices for whose streams a future of torch waits by itself."""
        return [device for device in self.devices if device.type == "cuda"]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Makes them the current streams of another thread; keeps an event behind its work."""
        with contextlib.ExitStack() as stack:
            for _, module, stream in self._streams:
                stack.enter_context(module.stream(stream))
            try:
                yield
            finally:
                for device, module, stream in self._streams:
                    event = module.Event()
                    event.record(stream)
                    self._events.append((device, module, event))

    def follow(self) -> None:
        """Makes the current streams of this thread wait for what the other thread has queued."""
        for device, module, event in self._events:
            module.current_stream(device).wait_event(event)
