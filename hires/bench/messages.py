"""Defines the messages of ``hires bench comm``: buffers, calls, right results, bandwidths.

A call is made through any library with the names of ``torch.distributed``, so that hires.comm and
torch run the same lines. The values are small whole numbers, whose sums are exact in every type, so
every element of a result can be checked.

Source:
    Bandwidths: NVIDIA nccl-tests, doc/PERFORMANCE.md. Point to point: OSU micro-benchmarks,
    osu_latency (half a round trip), osu_bw and osu_bibw (windows of 64 messages and an answer).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.bench.race import Runner
from hires.engine.device import RankDevice

ROOT = 0
WINDOW, WINDOW_BYTES = 64, 2**26
"""Messages under way at once in the tests of bandwidth, as in osu_bw; fewer if they were larger."""
_PERIOD, _POISON, _TAG = 7, 99, 11

Call = Callable[[], object]
Right = Callable[[list[Tensor], int], Tensor | None]
"""What the inputs of all ranks become on a rank; None: it gets nothing."""


class BenchOperation(NamedTuple):
    """An operation as it is measured; a size is of the tensor that a rank contributes."""

    table: str  # its name in a tuning table
    right: Right = lambda inputs, rank: None
    passes: int = 0  # how often nccl-tests says that the parts of other ranks pass the bus
    of_all: bool = False  # whether it divides the time by the bytes of all ranks, or directions
    parts: bool = False  # whether the size is that of one part for each rank

    def bandwidths(self, num_bytes: int, ranks: int, seconds: float) -> tuple[float, float]:
        """Returns algorithm and bus bandwidth in bytes per s."""
        many = 2 if self.table == "send" else ranks
        algorithm = num_bytes * (many if self.of_all else 1) / seconds
        return algorithm, algorithm * (self.passes * (ranks - 1) / ranks if self.passes else 1)


def _sum(inputs: list[Tensor]) -> Tensor:
    return torch.stack(inputs).sum(0, dtype=inputs[0].dtype)


def _part(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.view(ranks, -1)[rank]


def _of_partner(inputs: list[Tensor], rank: int) -> Tensor | None:
    # The first and the last rank exchange messages.
    return {0: inputs[-1], len(inputs) - 1: inputs[0]}.get(rank)


MESSAGES = LATENCY, BANDWIDTH, BIDIRECTIONAL = "latency", "bandwidth", "bidirectional"
BARRIER = "barrier"
BENCHED = {
    LATENCY: BenchOperation("send", _of_partner),
    BANDWIDTH: BenchOperation("send", lambda x, rank: x[ROOT] if rank == len(x) - 1 else None),
    BIDIRECTIONAL: BenchOperation("send", _of_partner, of_all=True),
    "all_reduce": BenchOperation("all_reduce", lambda x, _: _sum(x), 2),
    "reduce": BenchOperation("reduce", lambda x, rank: None if rank else _sum(x)),
    "broadcast": BenchOperation("broadcast", lambda x, _: x[ROOT]),
    "all_gather_into_tensor": BenchOperation(
        "all_gather", lambda x, _: torch.cat(x), 1, of_all=True
    ),
    "reduce_scatter_tensor": BenchOperation(
        "reduce_scatter", lambda x, rank: _part(_sum(x), rank, len(x)), 1, parts=True
    ),
    "all_to_all_single": BenchOperation(
        "all_to_all", lambda x, me: torch.cat([_part(t, me, len(x)) for t in x]), 1, parts=True
    ),
    "gather": BenchOperation(
        "gather", lambda x, rank: None if rank else torch.cat(x), 1, of_all=True
    ),
    "scatter": BenchOperation("scatter", lambda x, rank: _part(x[ROOT], rank, len(x))),
    BARRIER: BenchOperation(BARRIER),
}
"""Name of the function, or of a test of messages; in a scatter the size is what a rank gets."""
IN_PLACE = ("all_reduce", "reduce", "broadcast", BARRIER)
SUMS_IN_PLACE = IN_PLACE[:2]


class BenchCell(NamedTuple):
    """What is measured at a time."""

    operation: str
    num_bytes: int
    dtype: str = "float32"


class BenchBuffers:
    """The tensors of one rank for one cell."""

    def __init__(self, cell: BenchCell, rank: int, ranks: int, device: str = "cpu") -> None:
        self.operation, self.rank, self.ranks = cell.operation, rank, ranks
        self.partner = {0: ranks - 1, ranks - 1: 0}.get(rank, -1)
        """The other rank of messages; -1: none."""
        dtype, parts = getattr(torch, cell.dtype), BENCHED[cell.operation].parts
        number = max(1, cell.num_bytes // dtype.itemsize)
        number = max(1, number // ranks) * ranks if parts else number
        self.num_bytes = number * dtype.itemsize
        """What the tensors hold: the size, rounded to whole elements for each rank."""
        self._number = number * (ranks if cell.operation == "scatter" else 1)
        values = torch.arange(self._number + _PERIOD, dtype=torch.int32).remainder_(_PERIOD)
        self._values = values.to(device=device, dtype=dtype)
        self.input, right = self._pattern(rank).clone(), self.expected()
        self.output = self.input
        if self.operation not in IN_PLACE:
            self.output = self.input.new_zeros(0 if right is None else right.numel())

    def fill(self) -> None:
        """Writes the values of this rank, and poison where the result will be."""
        self.output.fill_(_POISON)
        self.input.copy_(self._pattern(self.rank))

    def zero_inputs(self) -> None:
        """Writes zeros where sums are in place, which keep them however often they are repeated."""
        if self.operation in SUMS_IN_PLACE:
            self.input.zero_()

    def num_wrong(self) -> int:
        """Returns how many elements of the result are wrong on this rank."""
        right = self.expected()
        return 0 if right is None else int((self.output != right).sum())

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Returns a tensor's parts of equal size, one for each rank."""
        return [*tensor.view(self.ranks, -1).unbind(0)]

    def _pattern(self, rank: int) -> Tensor:
        return self._values[3 * rank % _PERIOD :][: self._number]

    def expected(self) -> Tensor | None:
        """Returns the right result; None: this rank gets none."""
        inputs = [self._pattern(rank) for rank in range(self.ranks)]
        return BENCHED[self.operation].right(inputs, self.rank)


class MessageCalls(Runner):
    """The calls of one library in one cell; it holds a lock during each turn."""

    def __init__(
        self, call: Call, buffers: BenchBuffers, device: RankDevice, fence: Call, lock: Any = None
    ) -> None:
        self.call, self.buffers, self.device, self._fence = call, buffers, device, fence
        self._lock = lock or threading.Lock()

    def fence(self) -> object:
        """Waits for all ranks."""
        return self._fence()

    def before_step(self) -> None:
        """Takes the lock, and makes repeated sums keep their values."""
        self._lock.acquire()
        self.buffers.zero_inputs()

    def step(self) -> None:
        """Makes the call."""
        self.call()

    def after_step(self) -> None:
        """Releases the lock."""
        self._lock.release()

    def num_wrong(self) -> int:
        """Makes a call with the values of all ranks; returns how many elements came out wrong."""
        with self._lock:
            self.buffers.fill()
            self.device.synchronize()
            self.call()
            self.device.synchronize()
        return self.buffers.num_wrong()


def window(num_bytes: int) -> int:
    """Returns how many messages of a size are under way at once."""
    return max(2, min(WINDOW, WINDOW_BYTES // max(num_bytes, 1)))


def messages_in(operation: str, num_bytes: int) -> int:
    """Returns the messages one way, one after another, in a call: its time is divided by them."""
    return {LATENCY: 2, **dict.fromkeys(MESSAGES[1:], window(num_bytes))}.get(operation, 1)


def bind(library: Any, buffers: BenchBuffers) -> Call:
    """Returns a call without arguments of a library with the names of ``torch.distributed``."""
    if buffers.operation in MESSAGES:
        return _messages(library, buffers)
    return functools.partial(getattr(library, buffers.operation), *arguments(buffers))


def arguments(buffers: BenchBuffers) -> Sequence[Any]:
    """Returns the arguments of a collective."""
    input, output, name = buffers.input, buffers.output, buffers.operation
    root = buffers.rank == ROOT
    if name == "gather":
        return input, buffers.split(output) if root else None, ROOT
    if name == "scatter":
        return output, buffers.split(input) if root else None, ROOT
    places = {"all_reduce": (input,), BARRIER: ()}
    return places.get(name, (input, ROOT) if name in IN_PLACE else (output, input))


def _messages(library: Any, buffers: BenchBuffers) -> Call:
    input, output, peer = buffers.input, buffers.output, buffers.partner
    first, count, answer = buffers.rank == ROOT, window(buffers.num_bytes), input.new_zeros(1)

    def ping_pong() -> None:  # of blocking calls, as osu_latency has
        both = (library.send, input), (library.recv, output)
        for call, tensor in both if first else both[::-1]:
            call(tensor, peer, tag=_TAG)

    def windows() -> None:
        one_way = buffers.operation == BANDWIDTH
        receives, sends = count * (not one_way or not first), count * (not one_way or first)
        works = [library.irecv(output, peer, tag=_TAG) for _ in range(receives)]
        works += [library.isend(input, peer, tag=_TAG) for _ in range(sends)]
        for work in works:
            work.wait()
        if one_way:
            (library.irecv if first else library.isend)(answer, peer, tag=_TAG + 1).wait()

    if peer < 0:  # ranks between the first and the last only take part in the fence
        return lambda: None
    return ping_pong if buffers.operation == LATENCY else windows
