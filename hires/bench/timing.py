"""How long does a step take? The one stopwatch: warm-up, barrier, the slowest rank is the sample.

Contestants run round-robin, one sample each per round and in another order every round, so that
whatever else happens on the machine hits all of them alike. Numbers of different runs are never
compared; a ratio is taken round by round.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hires.comm import Group, all_gather, barrier
from hires.core.store.summary import quantile

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What the stopwatch needs of a contestant on one rank."""

    def prepare(self) -> None:
        """Makes everything ready; not timed."""

    def step(self) -> object:
        """Runs one step; timed."""

    def tidy(self) -> None:
        """Lets go what the step left behind; not timed."""


@dataclass(frozen=True)
class Samples:
    """All counted steps of one contestant, one number a round."""

    step_s: list[float]
    """Seconds of the slowest rank."""
    cpu_s: list[float]
    """Seconds of processor time, all threads of all ranks: other work on the machine adds less."""


@dataclass(frozen=True)
class Spread:
    """Some samples in short: seconds of a step, or ratios of two."""

    median: float
    p10: float
    p90: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Returns median, p10, p90 and count."""
    low, middle, high = (quantile(samples, fraction) for fraction in (0.1, 0.5, 0.9))
    return Spread(middle, low, high, len(samples))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Returns the spread of the ratios of two contestants, taken within each round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def race(
    runners: Mapping[str, Runner | None], rounds: int, warmup: int, world: Group
) -> dict[str, Samples]:
    """Returns the seconds of every counted step.

    Args:
        runners: contestants by name, the same names on all ranks; None where this rank is not in.
        rounds: counted rounds.
        warmup: rounds before them.
        world: all ranks.

    Returns:
        ``rounds`` samples a contestant, the same on all ranks.
    """
    own: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    gc.collect()
    gc.disable()  # a collection would hit one contestant and not the others
    try:
        for index in range(warmup + rounds):
            began = time.perf_counter()
            for name in _order([*runners], index):
                own[name].append(_sample(runners[name]))
            gc.collect()
            took_s = time.perf_counter() - began
            log.info("round %d of %d took %.1f s", index + 1, warmup + rounds, took_s)
    finally:
        gc.enable()
    table = torch.tensor([samples[warmup:] for samples in own.values()], dtype=torch.float64)
    ranks = all_gather(table, world)  # (ranks, contestants, rounds, 2)
    slowest, cpu = ranks[..., 0].amax(0), ranks[..., 1].sum(0)
    return {n: Samples(slowest[i].tolist(), cpu[i].tolist()) for i, n in enumerate(own)}


def _sample(runner: Runner | None) -> tuple[float, float]:
    """Returns the seconds of one step on this rank and those of its processor, 0 if not in."""
    if runner is None:
        barrier()
        return 0.0, 0.0
    runner.prepare()
    barrier()
    cpu_s, began = time.process_time(), _now()
    runner.step()
    took_s, cpu_s = _now() - began, time.process_time() - cpu_s
    runner.tidy()
    return took_s, cpu_s


def _order(names: list[str], index: int) -> list[str]:
    """Returns a round's order of the contestants: the same on all ranks, another each round."""
    random.Random(index).shuffle(names)
    return names


def _now() -> float:
    """Returns the time in seconds, when the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
