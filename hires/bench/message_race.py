"""Lets libraries take turns in one operation after another: the stopwatch of messages.

Of every operation and size each library runs a block of calls in every round, in another order
each time, so that other work on the machine hits all alike. A call is timed alone, behind a fence
that all ranks leave together; the slowest rank is the sample. The first and the last round check
every element of the result.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hires.bench.messages import BenchBuffers, Call, messages_in
from hires.core.errors import HiresError

Block = Callable[[int], list[float]]
"""Runs so many calls and returns the seconds of each."""
Bind = Callable[[BenchBuffers], Block | None]
"""The block of a library; None: it lacks the operation."""
LEAST_CALLS, MOST_CALLS = 2, 400
"""Of a block."""
Row = dict[str, Any]
"""What was measured of a cell on some ranks, as plain values."""


class BenchCell(NamedTuple):
    """What is measured at a time."""

    operation: str
    num_bytes: int
    dtype: str = "float32"


class RaceWorld(NamedTuple):
    """What ranks agree by: the library beside which nothing is measured."""

    rank: int
    ranks: int
    fence: Callable[[], object]
    """All ranks leave it together, and the device has done all before it."""
    largest: Callable[[Tensor], object]
    """Makes a tensor of float64 the element-wise largest of all ranks."""
    device: str = "cpu"
    synchronize: Callable[[], object] = lambda: None
    """Returns when the device has done all that it was given."""

    def most(self, value: float) -> float:
        """Returns the largest value of all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        self.largest(tensor)
        return tensor.item()


def timed(call: Call, world: RaceWorld) -> Block:
    """Returns the block of a call."""
    clock, fence, synchronize = time.perf_counter, world.fence, world.synchronize
    on_host = world.device == "cpu"

    def block(times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            fence()
            begin_s = clock()
            call()
            if not on_host:
                synchronize()
            seconds.append(clock() - begin_s)
        return seconds

    return block


def race_cell(
    cell: BenchCell, libraries: Mapping[str, Bind], world: RaceWorld, rounds: int, seconds: float
) -> Row:
    """Returns the row of a cell as plain values, the same on all ranks.

    ``seconds``: of each library, all rounds together. One that lacks the operation has its reason
    as ``missing``.
    """
    dtype = getattr(torch, cell.dtype)
    buffers = BenchBuffers(
        cell.operation, cell.num_bytes, dtype, world.rank, world.ranks, world.device
    )
    messages = messages_in(cell.operation, buffers.num_bytes)
    blocks, results = _possible(libraries, world, buffers)
    samples: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in blocks}
    counts = {}
    for name, block in blocks.items():  # from the quickest of three calls that warm up
        buffers.zero_inputs()
        fitting = seconds / rounds / max(world.most(min(block(3))), 1e-7)
        counts[name] = int(min(MOST_CALLS, max(LEAST_CALLS, fitting)))
    for index in range(rounds):
        order = [*blocks]
        random.Random(index).shuffle(order)  # the same on all ranks
        for name in order:
            buffers.zero_inputs()
            taken = torch.tensor(blocks[name](counts[name]), dtype=torch.float64)
            world.largest(taken)
            samples[name].append(taken.numpy() / messages)
            if index in (0, rounds - 1):
                buffers.fill()
                blocks[name](1)
                results[name]["wrong"] += int(world.most(buffers.num_wrong()))
    for name, blocks_s in samples.items():
        results[name] |= summary(blocks_s)
    return {**cell._asdict(), "bytes": buffers.num_bytes, "ranks": world.ranks, "ways": results}


def summary(rounds: Sequence[np.ndarray[Any, Any]]) -> Row:
    """Returns what is kept of the seconds of all rounds of a library."""
    seconds = np.concatenate(rounds)
    p50, p99 = np.quantile(seconds, (0.5, 0.99)).tolist()
    medians = [float(np.median(block)) for block in rounds]
    return {"p50_s": p50, "p99_s": p99, "count": len(seconds), "rounds_s": medians}


def noise_of(rows: Sequence[Row], share: float = 0.5) -> float:
    """Returns the noise that a share of all libraries in all cells does not exceed.

    It is how far the medians of rounds lie apart, relative to the middle one: 1.48 times the median
    distance, which is the standard deviation of normal noise.
    """
    noises = []
    for way in (way for row in rows for way in row["ways"].values() if "rounds_s" in way):
        middle = statistics.median(way["rounds_s"])
        noises.append(1.4826 * statistics.median(abs(s - middle) for s in way["rounds_s"]) / middle)
    return float(np.quantile(noises or [0.0], share))


def _possible(
    libraries: Mapping[str, Bind], world: RaceWorld, buffers: BenchBuffers
) -> tuple[dict[str, Block], dict[str, Row]]:
    # The blocks of libraries that all ranks could call once, and the results of all of them.
    blocks: dict[str, Block] = {}
    results: dict[str, Row] = {}
    for name, bind in libraries.items():
        missing, block = "", None
        buffers.fill()
        try:
            block = bind(buffers)
            if block is None:
                missing = "it has no such operation or type"
            else:
                block(1)
        except (HiresError, RuntimeError, ValueError, TypeError, KeyError) as error:
            missing = str(error).strip().splitlines()[0][:200] or type(error).__name__
        if world.most(bool(missing)):
            results[name] = {"missing": missing or "another rank lacks it"}
        elif block is not None:
            results[name], blocks[name] = {"wrong": 0}, block
    return blocks, results
