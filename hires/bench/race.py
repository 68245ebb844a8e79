"""Times steps, the one stopwatch: warm-up, barrier, the slowest rank is the sample.

Rows take turns, in another order every round, so that whatever else happens on the machine hits
all of them alike. A ratio is taken round by round, never between numbers of different runs.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hires.comm import Group, all_gather_stacked, barrier
from hires.engine.device import RankDevice

log = logging.getLogger(__name__)


class Runner:
    """A row on one rank; what the stopwatch runs: only ``step`` is timed."""

    threads = 1
    deterministic = False  # whether kernels of cuDNN must repeat their bits, as in a run of hires
    device = RankDevice()  # a step ends when it has done all that it was given
    parameters: Mapping[str, nn.Parameter] = {}  # those that this rank holds, by name

    def before_step(self) -> None:
        """Sets the number of threads and the kind of kernels."""
        torch.set_num_threads(self.threads)
        torch.backends.cudnn.deterministic = self.deterministic

    def step(self) -> Tensor | None:
        """Runs one step; returns this rank's part of loss or outputs."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Frees the gradients, so that all rows fit into memory together."""
        for parameter in self.parameters.values():
            parameter.grad = None
        torch.set_num_threads(1)

    def close(self) -> None:
        """Frees what it holds."""


class Samples(NamedTuple):
    """All counted steps of one row: seconds of the slowest rank, and of all ranks' processors."""

    step_s: list[float]
    cpu_s: list[float]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Returns median, p10, p90 and count."""
    low, middle, high = np.quantile(samples, (0.1, 0.5, 0.9)).tolist()
    return {"median": middle, "p10": low, "p90": high, "count": len(samples)}


def ratios(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> dict[str, float]:
    """Returns the spread of ``factor`` times the ratios of two rows, taken within each round."""
    return spread([factor * a / b for a, b in zip(over, under, strict=True)])


def turns(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """Yields the order of each round: the same on all ranks, another each round."""
    every = [*names]
    for index in range(rounds):
        order = [*every]
        random.Random(index).shuffle(order)
        yield order


def race(
    runners: Mapping[str, Runner | None], rounds: int, warmup: int, world: Group
) -> Iterator[dict[str, Samples]]:
    """Yields the seconds of every counted step so far, after each round that follows the warm-up.

    ``runners`` has the same names on all ranks, and None where this rank is not in. All ranks of
    the ``world`` get the same samples.
    """
    samples = {name: Samples([], []) for name in runners}
    gc.collect()
    gc.disable()  # a collection would hit one row and not the others
    try:
        for index, order in enumerate(turns(runners, warmup + rounds)):
            sampled = {name: _sample(runners[name]) for name in order}
            table = torch.tensor([sampled[name] for name in runners], dtype=torch.float64)
            ranks = all_gather_stacked(table, world)  # (ranks, rows, 2)
            round_s = sum(step_s for step_s, _ in sampled.values())
            log.info("round %d of %d: steps of %.1f s", index + 1, warmup + rounds, round_s)
            if index >= warmup:
                for kept, steps in zip(samples.values(), ranks.unbind(1), strict=True):
                    kept.step_s.append(float(steps[:, 0].max()))
                    kept.cpu_s.append(float(steps[:, 1].sum()))
                yield samples
            gc.collect()
    finally:
        gc.enable()


def _sample(runner: Runner | None) -> tuple[float, float]:
    # The seconds of one step on this rank and those of its processor, 0 if it is not in.
    if runner is None:
        barrier()
        return 0.0, 0.0
    runner.before_step()
    barrier()
    cpu_s, began = time.process_time(), _now(runner)
    runner.step()
    step_s, cpu_s = _now(runner) - began, time.process_time() - cpu_s
    runner.after_step()
    return step_s, cpu_s


def _now(runner: Runner) -> float:
    # The time in seconds, when the runner's device has done all that it was given.
    runner.device.synchronize()
    return time.perf_counter()
