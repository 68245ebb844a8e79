"""Times steps and messages, the one stopwatch: warm-up, barrier, the slowest rank is the sample.

Rows take turns, in another order every round, so that whatever else happens on the machine hits
all of them alike. A turn is one step, or as many calls as fit into its time, each timed alone. A
ratio is taken round by round, never between numbers of different runs.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hires.comm import Group, all_gather_stacked, barrier
from hires.engine.device import RankDevice

MOST_CALLS = 400  # of a turn


class Runner:
    """A row on one rank; what the stopwatch runs: only ``step`` is timed."""

    threads = 1
    deterministic = False  # whether kernels of cuDNN must repeat their bits, as in a run of hires
    device = RankDevice()  # a step ends when it has done all that it was given
    parameters: Mapping[str, nn.Parameter] = {}  # those that this rank holds, by name

    def fence(self) -> object:
        """Waits for all ranks, before each step."""
        return barrier()

    def before_step(self) -> None:
        """Sets the number of threads and the kind of kernels, before each turn."""
        torch.set_num_threads(self.threads)
        torch.backends.cudnn.deterministic = self.deterministic

    def step(self) -> Tensor | None:
        """Runs one step; returns this rank's part of loss or outputs."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Frees the gradients after each turn, so that all rows fit into memory together."""
        for parameter in self.parameters.values():
            parameter.grad = None
        torch.set_num_threads(1)

    def close(self) -> None:
        """Frees what it holds."""


class Samples(NamedTuple):
    """All counted turns of a row: seconds of the slowest rank, and of all ranks' processors."""

    turns_s: list[list[float]]
    """Of each turn, those of its calls."""
    cpu_s: list[float]

    @property
    def rounds_s(self) -> list[float]:
        """The median of each turn."""
        return [statistics.median(calls_s) for calls_s in self.turns_s]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Returns median, p10, p90, p99 and count."""
    low, middle, high, last = np.quantile(samples, (0.1, 0.5, 0.9, 0.99)).tolist()
    return {"median": middle, "p10": low, "p90": high, "p99": last, "count": len(samples)}


def ratios(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> dict[str, float]:
    """Returns the spread of ``factor`` times the ratios of two rows, taken within each round."""
    return spread([factor * a / b for a, b in zip(over, under, strict=True)])


def noise_of(rounds_s: Sequence[float]) -> float:
    """Returns how far the medians of rounds lie apart, relative to the middle one.

    It is 1.48 times the median distance, which is the standard deviation of normal noise.
    """
    middle = statistics.median(rounds_s)
    return 1.4826 * statistics.median(abs(one - middle) for one in rounds_s) / middle


def turns(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """Yields the order of each round: the same on all ranks, another each round."""
    every = [*names]
    for index in range(rounds):
        order = [*every]
        random.Random(index).shuffle(order)
        yield order


def race(
    runners: Mapping[str, Runner | None],
    rounds: int,
    warmup: int,
    world: Group,
    turn_s: float = 0.0,
) -> Iterator[dict[str, Samples]]:
    """Yields the seconds of every counted turn so far, after each round that follows the warm-up.

    ``runners`` has the same names on all ranks, and None where this rank is not in. All ranks of
    the ``world`` get the same samples. A turn has as many calls as fit into ``turn_s``, by the
    quickest of the warm-up, and one at least.
    """
    samples = {name: Samples([], []) for name in runners}
    calls = dict.fromkeys(runners, 1)
    quickest = torch.full([len(runners)], torch.inf, dtype=torch.float64)
    gc.collect()
    gc.disable()  # a collection would hit one row and not the others
    gc.freeze()
    try:
        for index, order in enumerate(turns(runners, warmup + rounds)):
            taken = {name: _turn(runners[name], calls[name]) for name in order}
            values = [second for name in runners for second in taken[name][0]]
            values += [taken[name][1] for name in runners]
            ranks = all_gather_stacked(torch.tensor(values, dtype=torch.float64), world)
            slowest, cpu_s = ranks.amax(0)[: -len(runners)], ranks.sum(0)[-len(runners) :]
            if index < warmup:
                quickest = quickest.minimum(slowest)
                if index == warmup - 1:
                    fitting = [turn_s / max(call_s, 1e-7) for call_s in quickest.tolist()]
                    calls = {
                        name: int(min(MOST_CALLS, max(1, count)))
                        for name, count in zip(runners, fitting, strict=True)
                    }
            else:
                each = torch.split(slowest, [*calls.values()])
                for kept, calls_s, cpu in zip(samples.values(), each, cpu_s, strict=True):
                    kept.turns_s.append(calls_s.tolist())
                    kept.cpu_s.append(float(cpu))
                yield samples
            gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()


def _turn(runner: Runner | None, calls: int) -> tuple[list[float], float]:
    # The seconds of each call on this rank, and those of its processor; 0 if it is not in.
    if runner is None:
        for _ in range(calls):
            barrier()
        return [0.0] * calls, 0.0
    clock, fence, step = time.perf_counter, runner.fence, runner.step
    synchronize, calls_s, cpu_s = runner.device.synchronize, list[float](), 0.0
    runner.before_step()
    for _ in range(calls):
        fence()
        synchronize()
        cpu_began_s, began_s = time.process_time(), clock()
        step()
        synchronize()
        calls_s.append(clock() - began_s)
        cpu_s += time.process_time() - cpu_began_s
    runner.after_step()
    return calls_s, cpu_s
