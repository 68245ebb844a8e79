"""Streams, events and memory of the simulated device.

A copy that does not block is done as late as the streams allow, and until then its target holds no
numbers:

    pinned memory     numbers ----------------------------.        changed too early: wrong
    copy stream       copy begins . record(event) . . .  done
    compute stream    NaN ..................... wait_event(event)   read too early: NaN

Memory belongs to the stream that allocated it, which may use it again as soon as it is freed. So a
tensor that another stream has used must be kept for that one (``record_stream`` of CUDA), or the
host must have synchronised with it: else the operator that follows its end fails.
"""

from __future__ import annotations

import collections
import math
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _LateCopy(NamedTuple):
    target: Tensor
    source: Tensor

    def touches(self, tensor: Tensor) -> bool:
        return _address(tensor) in (_address(self.target), _address(self.source))


class SimulatedStream:
    """Work of the device in order; only copies that do not block are ever left to do."""

    def __init__(self) -> None:
        self._copies: collections.deque[_LateCopy] = collections.deque()
        self.begun = self.done = 0  # copies, so far
        with _lock:
            _streams.add(self)

    def begin(self, target: Tensor, source: Tensor) -> None:
        """Begins a copy, which is left to do; until it is done its target holds no numbers."""
        with _lock:
            if any(copy.touches(target) for copy in self._copies):
                self.finish()  # in the order of the stream
            if target.is_floating_point() or target.is_complex():
                target.fill_(math.nan)
            elif target.dtype != torch.bool:
                target.fill_(torch.iinfo(target.dtype).max)
            self._copies.append(_LateCopy(target, source))
            self.begun += 1

    def finish(self, number: int | None = None) -> None:
        """Does the first ``number`` of all copies that were begun, or all."""
        with _lock:
            while self._copies and (number is None or self.done < number):
                copy = self._copies.popleft()
                copy.target.copy_(copy.source)
                self.done += 1

    def wait_event(self, event: SimulatedEvent) -> None:
        event.synchronize()

    def wait_stream(self, stream: SimulatedStream) -> None:
        stream.finish()

    def synchronize(self) -> None:
        self.finish()
        for memory in [*_memory.values()]:
            memory.users.discard(self)


class _Memory(NamedTuple):
    # Memory that a stream other than the default one has allocated or used.
    owner: weakref.ref[torch.UntypedStorage]
    home: SimulatedStream
    users: set[SimulatedStream]  # streams whose work with it may be under way
    kept_for: set[SimulatedStream]


class SimulatedEvent:
    """A place in a stream, with the time at which the stream was there."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._stream, self._number, self._at_s = _default, 0, 0.0

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Puts the event behind all that a stream was given so far."""
        self._stream = stream or current_stream()
        self._number, self._at_s = self._stream.begun, time.perf_counter()

    def synchronize(self) -> None:
        self._stream.finish(self._number)

    def query(self) -> bool:
        return self._stream.done >= self._number

    def elapsed_time(self, later: SimulatedEvent) -> float:
        return 1e3 * (later._at_s - self._at_s)


_lock = threading.RLock()
_streams: weakref.WeakSet[SimulatedStream] = weakref.WeakSet()
_default = SimulatedStream()
_current = threading.local()  # each thread's stream
_pinned: set[int] = set()  # addresses of pinned memory
_memory: dict[int, _Memory] = {}  # by address
_freed_early: list[RuntimeError] = []  # found since the last operator


def current_stream() -> SimulatedStream:
    stream: SimulatedStream = getattr(_current, "stream", _default)
    return stream


def pin(tensor: Tensor) -> Tensor:
    """Returns a tensor of the host, whose memory counts as pinned from now on."""
    address = _address(tensor)
    if tensor.numel() and address not in _pinned:
        _pinned.add(address)
        weakref.finalize(tensor.untyped_storage(), _pinned.discard, address).atexit = False
    return tensor


def keep_for(tensor: Tensor, stream: SimulatedStream) -> None:
    """Keeps the memory of a tensor, when it is freed, until the stream has done its work so far."""
    if tensor.numel():
        _memory_of(tensor, _default).kept_for.add(stream)


def _memory_of(tensor: Tensor, home: SimulatedStream) -> _Memory:
    # What is noted of a tensor's memory, which ``home`` has allocated if there is no note yet.
    storage = host_of(tensor).untyped_storage()
    address = storage.data_ptr()
    memory = _memory.get(address)
    if memory is None or memory.owner() is not storage:  # another thread is about to free that one
        memory = _memory[address] = _Memory(weakref.ref(storage), home, set(), set())
        weakref.finalize(storage, _free, address, memory).atexit = False
    return memory


def note_use(operands: Sequence[Tensor], stream: SimulatedStream) -> None:
    """Notes that a stream uses tensors, as far as several streams share memory."""
    for one in operands if _memory or stream is not _default else ():
        if one.numel() and (stream is not _default or _address(one) in _memory):
            _memory_of(one, _default).users.add(stream)


def note_home(tensor: Tensor) -> None:
    """Notes that this thread's stream allocated the memory of a tensor, unless it is in use."""
    if tensor.numel() and current_stream() is not _default:
        _memory_of(tensor, current_stream())


def freed_early() -> RuntimeError | None:
    """Returns that memory was freed while a stream used it, once; None: it was not."""
    return _freed_early.pop() if _freed_early else None


def _free(address: int, memory: _Memory) -> None:
    if _memory.get(address) is memory:
        del _memory[address]
    if memory.users - memory.kept_for - {memory.home}:
        text = "a tensor was freed while another stream than the one that allocated it used it"
        _freed_early.append(RuntimeError(f"{text}; keep_for(tensor, stream) is missing"))


def synchronize_all() -> None:
    with _lock:
        for stream in [*_streams]:
            stream.synchronize()


def set_current(stream: SimulatedStream) -> SimulatedStream:
    """Gives a stream what this thread computes from now on; returns the one before."""
    before, _current.stream = current_stream(), stream
    return before


def is_pinned(tensor: Tensor) -> bool:
    return _address(tensor) in _pinned


def host_of(tensor: Tensor) -> Tensor:
    """Returns the tensor of the CPU that holds the numbers of a tensor of any device."""
    held: Tensor = getattr(tensor, "held", tensor)
    return held


def _address(tensor: Tensor) -> int:
    return int(host_of(tensor).untyped_storage().data_ptr())
