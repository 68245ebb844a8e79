"""Lets libraries take turns in one operation after another: the stopwatch of messages.

Of every operation and size each way runs a block of calls in every round, in another order
each time, so that other work on the machine hits all alike. A call is timed alone, behind a fence
that all ranks leave together; the slowest rank is the sample. The first and the last round check
every number of the result.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hires.bench.messages import (
    BenchBuffers,
    Call,
    messages_in,
)
from hires.core.errors import HiresError

Fence = Callable[[], object]
Block = Callable[[int], list[float] | None]
"""Runs so many calls and returns the seconds of each; None: the way lacks the operation."""
Bind = Callable[[BenchBuffers, bool], Block | None]
"""(buffers, blocking) -> the block of a way."""
LEAST_CALLS, MOST_CALLS = 2, 400
"""Of a block."""


class BenchCell(NamedTuple):
    """What is measured at a time."""

    operation: str
    num_bytes: int
    dtype: str = "float32"
    blocking: bool = True

    @property
    def key(self) -> str:
        """The cell as text, the same in every run."""
        return f"{self.operation} {self.num_bytes} {self.dtype} {'' if self.blocking else 'async'}"


@dataclasses.dataclass(frozen=True)
class RacePlan:
    """How long everything is measured."""

    rounds: int
    seconds: float
    """Of each way in a cell, all rounds together."""


class RaceWorld(NamedTuple):
    """What ranks agree by: the library beside which nothing is measured."""

    rank: int
    ranks: int
    fence: Fence
    """All ranks leave it together, and the device has done all before it."""
    largest: Callable[[Tensor], object]
    """Makes a tensor of float64 the element-wise largest of all ranks."""
    device: str = "cpu"
    synchronize: Callable[[], object] = lambda: None
    """Returns when the device has done all that it was given."""


def timed(call: Call, world: RaceWorld) -> Block:
    """Returns the block of a call in Python."""
    clock, fence, synchronize = time.perf_counter, world.fence, world.synchronize
    on_host = world.device == "cpu"

    def block(times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            fence()
            began = clock()
            call()
            if not on_host:
                synchronize()
            seconds.append(clock() - began)
        return seconds

    return block


def race_cell(
    cell: BenchCell, ways: Mapping[str, Bind], world: RaceWorld, plan: RacePlan
) -> dict[str, Any]:
    """Returns the row of a cell as plain values, the same on all ranks.

    A way that lacks the operation has its reason as ``missing``.
    """
    dtype, place = getattr(torch, cell.dtype), (world.rank, world.ranks, world.device)
    buffers = BenchBuffers(cell.operation, cell.num_bytes, dtype, *place)
    messages = messages_in(cell.operation, buffers.num_bytes)
    blocks, rows = _possible(ways, cell, world, buffers)
    samples: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in blocks}
    counts = {name: _calls(block, buffers, world, plan) for name, block in blocks.items()}
    for index in range(plan.rounds):
        order = [*blocks]
        random.Random(index).shuffle(order)  # the same on all ranks
        for name in order:
            buffers.zero_inputs()
            seconds = torch.tensor(blocks[name](counts[name]), dtype=torch.float64)
            world.largest(seconds)
            samples[name].append(seconds.numpy() / messages)
            if index in (0, plan.rounds - 1):
                rows[name]["wrong"] += _wrong(blocks[name], buffers, world)
    for name, rounds in samples.items():
        rows[name] |= summary(rounds)
    return {**cell._asdict(), "bytes": buffers.num_bytes, "ranks": world.ranks, "ways": rows}


def summary(rounds: Sequence[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Returns what is kept of the seconds of all rounds of a way."""
    whole = np.concatenate(rounds)
    p50, p99 = np.quantile(whole, (0.5, 0.99)).tolist()
    return {
        "p50_s": p50,
        "p99_s": p99,
        "min_s": float(whole.min()),
        "count": len(whole),
        "rounds_s": [float(np.median(one)) for one in rounds],
    }


def relative_noise(rounds_s: Sequence[float]) -> float:
    """Returns how far the medians of rounds lie apart, relative to the middle one.

    It is 1.48 times the median distance, which is the standard deviation of normal noise.
    """
    middle = statistics.median(rounds_s)
    return 1.4826 * statistics.median(abs(one - middle) for one in rounds_s) / middle


def _possible(
    ways: Mapping[str, Bind], cell: BenchCell, world: RaceWorld, buffers: BenchBuffers
) -> tuple[dict[str, Block], dict[str, dict[str, Any]]]:
    # The blocks of ways that all ranks could call once, and the rows of all of them.
    blocks: dict[str, Block] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, bind in ways.items():
        missing, block = "", None
        buffers.fill()
        try:
            block = bind(buffers, cell.blocking)
            if block is None or block(1) is None:
                missing = "it has no such operation or type"
        except (HiresError, RuntimeError, ValueError, TypeError, KeyError) as error:
            missing = str(error).strip().splitlines()[0][:200] or type(error).__name__
        failed = torch.tensor([float(bool(missing))], dtype=torch.float64)
        world.largest(failed)
        lacks = {"missing": missing or "another rank lacks it"}
        rows[name] = lacks if failed.item() else {"wrong": 0}
        if block is not None and not failed.item():
            blocks[name] = block
    return blocks, rows


def _calls(block: Block, buffers: BenchBuffers, world: RaceWorld, plan: RacePlan) -> int:
    """Returns the calls of a block, from the quickest of three that warm up."""
    buffers.zero_inputs()
    quickest = torch.tensor([min(block(3) or [0.0])], dtype=torch.float64)
    world.largest(quickest)
    fitting = plan.seconds / plan.rounds / max(quickest.item(), 1e-7)
    return int(min(MOST_CALLS, max(LEAST_CALLS, fitting)))


def _wrong(block: Block, buffers: BenchBuffers, world: RaceWorld) -> int:
    """Returns the wrong numbers of one more call, those of the worst rank."""
    buffers.fill()
    block(1)
    wrong = torch.tensor([float(buffers.num_wrong())], dtype=torch.float64)
    world.largest(wrong)
    return int(wrong.item())
