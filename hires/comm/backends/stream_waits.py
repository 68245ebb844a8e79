"""Bounds the waits of a GPU's stream, during which this process does not wait.

A wait for NCCL puts an operation into the order of the stream and returns. If the other side never
comes, this process would wait for ever at its next synchronisation, without a name for the cause.
So an event is recorded after every such wait, and the process queries these events before it
synchronises:

    host      wait a | event   wait b | event   ...   oldest: a has ended, b has not: CommError b
    stream    ---- a ---- e -------- b (its sender hangs)

An event keeps no tensor, unlike the handle of an operation, which keeps what it fills.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any, NamedTuple

import torch

from hires.core.errors import CommError, PeerError

_POLL_S = 1e-4


class StreamWait(NamedTuple):
    """An operation that a stream waits for, and the event after it."""

    event: Any
    what: str
    ranks: tuple[int, ...]
    """Those that it needs; this one may be among them."""


class StreamWaits:
    """The operations that streams of a device wait for, in order; ``timeout_s``: for the next."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._module: Any = torch.get_device_module(device)
        self.timeout_s = timeout_s
        self._open: deque[StreamWait] = deque()
        self._free: list[Any] = []

    def add(self, what: str, ranks: tuple[int, ...]) -> None:
        """Notes an operation that this thread's stream now waits for; CommError: the device failed.

        Errors of the device from an earlier operation are raised by :meth:`finish_oldest`.
        """
        with contextlib.suppress(RuntimeError):
            self._drop_ended()  # so that a step needs few events
        event = self._free.pop() if self._free else self._module.Event()
        try:
            event.record()
        except RuntimeError as error:
            raise CommError(f"{what} failed on the device: {error}") from error
        self._open.append(StreamWait(event, what, ranks))

    def oldest(self) -> StreamWait | None:
        """Returns the first operation that may not have ended; None: all have."""
        return self._open[0] if self._open else None

    def finish_oldest(self) -> None:
        """Returns when the first operation has ended.

        CommError: it has not within the limit. RuntimeError: the device or NCCL reports an error.
        """
        until = time.monotonic() + self.timeout_s
        try:
            while not self._open[0].event.query():
                if time.monotonic() > until:
                    raise PeerError(f"it has not ended on the device for {self.timeout_s:g} s")
                time.sleep(_POLL_S)
        except (CommError, RuntimeError):
            self._open.clear()  # all others come after it
            raise
        self._drop_first()

    def _drop_ended(self) -> None:
        while self._open and self._open[0].event.query():
            self._drop_first()

    def _drop_first(self) -> None:
        self._free.append(self._open.popleft().event)
