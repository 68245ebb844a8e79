"""Defines and times the messages of ``hires bench comm``: buffers, calls, results, bandwidths.

A call is made through any library with the names of ``torch.distributed``, so that hires.comm and
torch run the same lines. The values are small whole numbers, whose sums are exact in every type.
Of every operation and size each library runs a block of calls in every round, in turns. A call is
timed alone, behind a fence that all ranks leave together; the slowest rank is the sample. The first
and the last round check every element of the result.

Source:
    Bandwidths: NVIDIA nccl-tests, doc/PERFORMANCE.md. Point to point: OSU micro-benchmarks,
    osu_latency (half a round trip), osu_bw and osu_bibw (windows of 64 messages and an answer).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hires.bench.race import turns
from hires.core.errors import HiresError

ROOT = 0
WINDOW, WINDOW_BYTES = 64, 2**26
"""Messages under way at once in the tests of bandwidth, as in osu_bw; fewer if they were larger."""
LEAST_CALLS, MOST_CALLS = 2, 400  # of a block
_PERIOD, _POISON, _TAG = 7, 99, 11

Call = Callable[[], object]
Block = Callable[[int], list[float]]  # runs so many calls and returns the seconds of each
Row = dict[str, Any]  # what was measured of a cell on some ranks, as plain values


class BenchOperation(NamedTuple):
    """An operation as it is measured; a size is of the tensor that a rank contributes."""

    table: str  # its name in a tuning table
    passes: int = 0  # how often nccl-tests says that the parts of other ranks pass the bus
    of_all: bool = False  # whether it divides the time by the bytes of all ranks, or directions
    parts: bool = False  # whether the size is that of one part for each rank

    def bandwidths(self, num_bytes: int, ranks: int, seconds: float) -> tuple[float, float]:
        """Returns algorithm and bus bandwidth in bytes per s."""
        many = 2 if self.table == "send" else ranks
        algorithm = num_bytes * (many if self.of_all else 1) / seconds
        return algorithm, algorithm * (self.passes * (ranks - 1) / ranks if self.passes else 1)


MESSAGES = LATENCY, BANDWIDTH, BIDIRECTIONAL = "latency", "bandwidth", "bidirectional"
BARRIER = "barrier"
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor")
BENCHED = {
    LATENCY: BenchOperation("send"),
    BANDWIDTH: BenchOperation("send"),
    BIDIRECTIONAL: BenchOperation("send", of_all=True),
    "all_reduce": BenchOperation("all_reduce", 2),
    "reduce": BenchOperation("reduce"),
    "broadcast": BenchOperation("broadcast"),
    "all_gather_into_tensor": BenchOperation("all_gather", 1, of_all=True),
    "reduce_scatter_tensor": BenchOperation("reduce_scatter", 1, parts=True),
    "all_to_all_single": BenchOperation("all_to_all", 1, parts=True),
    "gather": BenchOperation("gather", 1, of_all=True),
    "scatter": BenchOperation("scatter"),
    BARRIER: BenchOperation(BARRIER),
}
"""Name of the function, or of a test of messages; in a scatter the size is what a rank gets."""


class BenchCell(NamedTuple):
    """What is measured at a time."""

    operation: str
    num_bytes: int
    dtype: str = "float32"


class RaceWorld(NamedTuple):
    """What ranks agree by: the library beside which nothing is measured."""

    rank: int
    ranks: int
    fence: Callable[[], object]  # all ranks leave it together; the device has done all before it
    largest: Callable[[Tensor], object]  # makes a tensor the element-wise largest of all ranks
    device: str = "cpu"
    synchronize: Callable[[], object] = lambda: None

    def most(self, value: float) -> float:
        """Returns the largest value of all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        self.largest(tensor)
        return tensor.item()


class BenchBuffers:
    """The tensors of one rank for one cell."""

    def __init__(self, cell: BenchCell, rank: int, ranks: int, device: str = "cpu") -> None:
        self.operation, self.rank, self.ranks = cell.operation, rank, ranks
        self.peer = {0: ranks - 1, ranks - 1: 0}.get(rank, -1)
        """The other rank of messages, which the first and last exchange; -1: none."""
        dtype, root, name = getattr(torch, cell.dtype), rank == ROOT, cell.operation
        number = max(1, cell.num_bytes // dtype.itemsize)
        if BENCHED[name].parts:
            number = max(1, number // ranks) * ranks
        self.input = torch.zeros(number, dtype=dtype, device=device)
        sizes = {
            "all_gather_into_tensor": ranks * number,
            "gather": ranks * number if root else 0,
            "reduce_scatter_tensor": number // ranks,
            **dict.fromkeys(("all_to_all_single", "scatter", *MESSAGES), number),
        }
        self.output = self.input.new_zeros(sizes[name]) if name in sizes else self.input
        if name == "scatter" and root:
            self.input = self.input.new_zeros(ranks * number)
        most = number * (ranks if name == "scatter" else 1)
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
        right = self.expected()
        return 0 if right is None else int((self.output != right).sum())

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Returns a tensor's parts of equal size, one for each rank."""
        return [*tensor.view(self.ranks, -1).unbind(0)]

    def _pattern(self, rank: int, number: int) -> Tensor:
        return self._values[3 * rank % _PERIOD :][:number]

    def expected(self) -> Tensor | None:
        """Returns the right result; None: this rank gets none."""
        name, number, root = self.operation, self.input.numel(), self.rank == ROOT
        if name in MESSAGES:
            silent = self.peer < 0 or (name == BANDWIDTH and root)
            return None if silent else self._pattern(self.peer, number)
        if name == BARRIER or (name in ("reduce", "gather") and not root):
            return None
        if name == "scatter":
            whole = self._pattern(ROOT, self.output.numel() * self.ranks)
            return self.split(whole)[self.rank]
        inputs = [self._pattern(rank, number) for rank in range(self.ranks)]
        if name in REDUCTIONS:
            total = torch.stack(inputs).sum(0, dtype=self.input.dtype)
            return self.split(total)[self.rank] if "scatter" in name else total
        if name == "all_to_all_single":
            inputs = [self.split(one)[self.rank] for one in inputs]
        return inputs[ROOT] if name == "broadcast" else torch.cat(inputs)


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
    input, output, peer = buffers.input, buffers.output, buffers.peer
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


def timed(call: Call, world: RaceWorld) -> Block:
    """Returns the block of a call."""
    clock, fence, synchronize = time.perf_counter, world.fence, world.synchronize

    def block(times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            fence()
            begin_s = clock()
            call()
            synchronize()
            seconds.append(clock() - begin_s)
        return seconds

    return block


def race_cell(
    cell: BenchCell,
    libraries: Mapping[str, Callable[[BenchBuffers], Block]],
    world: RaceWorld,
    rounds: int,
    seconds: float,
) -> Row:
    """Returns the row of a cell as plain values, the same on all ranks.

    ``libraries`` bind the buffers to a block. ``seconds``: of each library, all rounds together.
    One that lacks the operation on a rank has its reason as ``missing``.
    """
    buffers = BenchBuffers(cell, world.rank, world.ranks, world.device)
    messages = messages_in(cell.operation, buffers.num_bytes)
    blocks: dict[str, Block] = {}
    results: dict[str, Row] = {}
    for name, bound in libraries.items():
        missing = ""
        buffers.fill()
        try:
            block = bound(buffers)
            block(1)
        except (HiresError, RuntimeError, ValueError, TypeError, KeyError) as error:
            missing = " ".join(str(error).split())[:200] or type(error).__name__
        if world.most(bool(missing)):
            results[name] = {"missing": missing or "another rank lacks it"}
        else:
            results[name], blocks[name] = {"wrong": 0}, block
    counts = {}
    for name, block in blocks.items():  # from the quickest of three calls that warm up
        buffers.zero_inputs()
        fitting = seconds / rounds / max(world.most(min(block(3))), 1e-7)
        counts[name] = int(min(MOST_CALLS, max(LEAST_CALLS, fitting)))
    samples: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in blocks}
    for index, order in enumerate(turns(blocks, rounds)):
        for name in order:
            buffers.zero_inputs()
            calls_s = torch.tensor(blocks[name](counts[name]), dtype=torch.float64)
            world.largest(calls_s)
            samples[name].append(calls_s.numpy() / messages)
            if index in (0, rounds - 1):
                buffers.fill()
                blocks[name](1)
                results[name]["wrong"] += int(world.most(buffers.num_wrong()))
    for name, blocks_s in samples.items():
        p50, p99 = np.quantile(np.concatenate(blocks_s), (0.5, 0.99)).tolist()
        medians = [float(np.median(block_s)) for block_s in blocks_s]
        results[name] |= {
            "p50_s": p50,
            "p99_s": p99,
            "count": rounds * counts[name],
            "rounds_s": medians,
        }
    return {**cell._asdict(), "bytes": buffers.num_bytes, "ranks": world.ranks, "ways": results}


def noise_of(rows: Sequence[Row], share: float = 0.5) -> float:
    """Returns the noise that a share of all libraries in all cells does not exceed.

    It is how far the medians of rounds lie apart, relative to the middle one: 1.48 times the median
    distance, which is the standard deviation of normal noise.
    """
    noises = [0.0]
    for way in (way for row in rows for way in row["ways"].values() if "rounds_s" in way):
        middle = statistics.median(way["rounds_s"])
        noises.append(1.4826 * statistics.median(abs(s - middle) for s in way["rounds_s"]) / middle)
    return float(np.quantile(noises[1:] or noises, share))
