"""Defines the messages that ``hires bench comm`` measures: buffers, calls, results, bandwidths.

A call is made through any library with the names of ``torch.distributed``, so that hires.comm and
torch run the same lines. The values are small whole numbers, whose sums are exact in every type.

Source:
    Bandwidths: NVIDIA nccl-tests, doc/PERFORMANCE.md. Point to point: OSU micro-benchmarks,
    osu_latency (half a round trip), osu_bw and osu_bibw (windows of 64 messages and an answer).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROOT = 0
WINDOW = 64
"""Messages under way at once in the tests of bandwidth, as in osu_bw."""
WINDOW_BYTES = 2**26
"""Fewer where they would be more than this."""
_PERIOD = 7
_POISON = 99
_TAG = 11

Call = Callable[[], object]


@dataclass(frozen=True)
class BenchOperation:
    """An operation of a size as it is measured; sizes are of the tensor that a rank contributes."""

    name: str
    """Of the function, or of a test of messages."""
    table: str = ""
    """In a tuning table; empty: the same."""
    total: Callable[[int, int], float] = lambda num_bytes, ranks: num_bytes
    """(bytes of the size, ranks) -> bytes by which nccl-tests divides the time."""
    factor: Callable[[int], float] = lambda ranks: 1.0
    """Ranks -> bus bandwidth over algorithm bandwidth."""
    parts: bool = False
    """Whether the size is that of one part for each rank."""

    def bandwidths(self, num_bytes: int, ranks: int, seconds: float) -> tuple[float, float]:
        """Returns algorithm and bus bandwidth in bytes per s."""
        algorithm = self.total(num_bytes, ranks) / seconds
        return algorithm, algorithm * self.factor(ranks)


def _of_all(num_bytes: int, ranks: int) -> float:
    return num_bytes * ranks


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


LATENCY, BANDWIDTH, BIDIRECTIONAL, BARRIER = "latency", "bandwidth", "bidirectional", "barrier"
BENCHED = {
    operation.name: operation
    for operation in (
        BenchOperation(LATENCY, "send"),
        BenchOperation(BANDWIDTH, "send"),
        BenchOperation(BIDIRECTIONAL, "send", lambda num_bytes, ranks: 2 * num_bytes),
        BenchOperation("all_reduce", factor=lambda ranks: 2 * (ranks - 1) / ranks),
        BenchOperation("reduce"),
        BenchOperation("broadcast"),
        BenchOperation("all_gather_into_tensor", "all_gather", _of_all, _others),
        BenchOperation("reduce_scatter_tensor", "reduce_scatter", factor=_others, parts=True),
        BenchOperation("all_to_all_single", "all_to_all", factor=_others, parts=True),
        BenchOperation("gather", "", _of_all, _others),
        BenchOperation("scatter"),
        BenchOperation(BARRIER),
    )
}
"""Name -> operation; in a scatter the size is what a rank gets."""
MESSAGES = (LATENCY, BANDWIDTH, BIDIRECTIONAL)
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor")


def table_name(operation: str) -> str:
    """Returns the name of a measured operation in a tuning table."""
    return BENCHED[operation].table or operation


class BenchBuffers:
    """The tensors of one rank for one operation and size."""

    def __init__(
        self,
        operation: str,
        num_bytes: int,
        dtype: torch.dtype,
        rank: int,
        ranks: int,
        device: str = "cpu",
    ) -> None:
        self.operation, self.rank, self.ranks = operation, rank, ranks
        self.peer = {0: ranks - 1, ranks - 1: 0}.get(rank, -1)
        """The other rank of messages, which the first and last exchange; -1: none."""
        number = max(1, num_bytes // dtype.itemsize)
        if BENCHED[operation].parts:
            number = max(1, number // ranks) * ranks
        self.input = torch.zeros(number, dtype=dtype, device=device)
        input, root = self.input, rank == ROOT
        sizes = {
            "all_gather_into_tensor": ranks * number,
            "gather": ranks * number if root else 0,
            "reduce_scatter_tensor": number // ranks,
            **dict.fromkeys(("all_to_all_single", "scatter", *MESSAGES), number),
        }
        self.output = input.new_zeros(sizes[operation]) if operation in sizes else input
        if operation == "scatter" and root:
            self.input = input.new_zeros(ranks * number)
        most = number * (ranks if operation == "scatter" else 1)
        values = torch.arange(most + _PERIOD, dtype=torch.int32).remainder_(_PERIOD)
        self._values = values.to(device=device, dtype=dtype)
        self.num_bytes = number * dtype.itemsize
        """What the tensors hold: the size, rounded to whole elements for each rank."""

    def fill(self) -> None:
        """Writes the values of this rank, and poison where the result will be."""
        self.output.fill_(_POISON)
        self.input.copy_(self._pattern(self.rank, self.input.numel()))

    def zero_inputs(self) -> None:
        """Writes zeros where sums are in place, which keep them however often they are repeated."""
        if self.operation in REDUCTIONS:
            self.input.zero_()

    def num_wrong(self) -> int:
        """Returns how many elements of the result are wrong on this rank."""
        expected = self._expected()
        return 0 if expected is None else int((self.output != expected).sum())

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Returns a tensor's parts of equal size, one for each rank."""
        return [*tensor.view(self.ranks, -1).unbind(0)]

    def _pattern(self, rank: int, number: int) -> Tensor:
        return self._values[3 * rank % _PERIOD :][:number]

    def _expected(self) -> Tensor | None:
        """Returns the right result; None: this rank gets none."""
        name, number, ranks = self.operation, self.input.numel(), range(self.ranks)
        root = self.rank == ROOT
        if name in REDUCTIONS:
            total = torch.zeros_like(self.input)
            for rank in ranks:
                total += self._pattern(rank, number)
            if name == "reduce_scatter_tensor":
                return self.split(total)[self.rank]
            return total if name == "all_reduce" or root else None
        if name in MESSAGES:
            silent = self.peer < 0 or (name == BANDWIDTH and root)
            return None if silent else self._pattern(self.peer, number)
        if name == "broadcast":
            return self._pattern(ROOT, number)
        if name == "all_to_all_single":
            return torch.cat([self.split(self._pattern(r, number))[self.rank] for r in ranks])
        if name == "scatter":
            inputs = self._pattern(ROOT, self.output.numel() * self.ranks)
            return self.split(inputs)[self.rank]
        if (name == "gather" and not root) or name == BARRIER:
            return None
        return torch.cat([self._pattern(rank, number) for rank in ranks])


def window(num_bytes: int) -> int:
    """Returns how many messages of a size are under way at once."""
    return max(2, min(WINDOW, WINDOW_BYTES // max(num_bytes, 1)))


def bind(library: Any, buffers: BenchBuffers) -> Call:
    """Returns a call without arguments of a library with the names of ``torch.distributed``."""
    if buffers.operation in MESSAGES:
        return _messages(library, buffers)
    return functools.partial(getattr(library, buffers.operation), *arguments(buffers))


def arguments(buffers: BenchBuffers) -> tuple[Any, ...]:
    """Returns the arguments of a collective."""
    input, output, name = buffers.input, buffers.output, buffers.operation
    root = buffers.rank == ROOT
    if name in ("gather", "scatter"):
        one, all_parts = (input, output) if name == "gather" else (output, input)
        return one, buffers.split(all_parts) if root else None, ROOT
    if name in ("reduce", "broadcast"):
        return input, ROOT
    return {"all_reduce": (input,), BARRIER: ()}.get(name, (output, input))


def _messages(library: Any, buffers: BenchBuffers) -> Call:
    input, output, peer, name = buffers.input, buffers.output, buffers.peer, buffers.operation
    first, count = buffers.rank == ROOT, window(buffers.num_bytes)
    send = functools.partial(library.isend, input, peer, tag=_TAG)
    receive = functools.partial(library.irecv, output, peer, tag=_TAG)
    answer = input.new_zeros(1)

    def ping_pong() -> None:  # of blocking calls, as osu_latency has
        if first:
            library.send(input, peer, tag=_TAG)
            library.recv(output, peer, tag=_TAG)
        else:
            library.recv(output, peer, tag=_TAG)
            library.send(input, peer, tag=_TAG)

    def one_way() -> None:
        works = [send() if first else receive() for _ in range(count)]
        for work in works:
            work.wait()
        (library.irecv if first else library.isend)(answer, peer, tag=_TAG + 1).wait()

    def both_ways() -> None:
        works = [receive() for _ in range(count)] + [send() for _ in range(count)]
        for work in works:
            work.wait()

    if peer < 0:  # ranks between the first and the last only take part in the fence
        return lambda: None
    return {LATENCY: ping_pong, BANDWIDTH: one_way, BIDIRECTIONAL: both_ways}[name]


def messages_in(operation: str, num_bytes: int) -> int:
    """Returns the messages one way, one after another, in a call: its time is divided by them."""
    if operation == LATENCY:
        return 2
    return window(num_bytes) if operation in MESSAGES else 1
