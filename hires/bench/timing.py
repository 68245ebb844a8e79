"""Times steps, the one stopwatch: warm-up, barrier, the slowest rank is the sample.

Contestants run round-robin, one sample each per round and in another order every round, so that
whatever else happens on the machine hits all of them alike. Numbers of different runs are never
compared; a ratio is taken round by round.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hires.comm import Group, all_gather, barrier

log = logging.getLogger(__name__)

OnRound = Callable[[int, "dict[str, Samples]"], None]
"""Called on all ranks after each counted round, with its number and all samples so far."""


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
    low, middle, high = np.quantile(samples, (0.1, 0.5, 0.9)).tolist()
    return Spread(middle, low, high, len(samples))


def ratios(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> Spread:
    """Returns the spread of ``factor`` times the ratios of two rows, taken within each round."""
    return spread([factor * a / b for a, b in zip(over, under, strict=True)])


def race(
    runners: Mapping[str, Runner | None],
    rounds: int,
    warmup: int,
    world: Group,
    on_round: OnRound = lambda number, samples: None,
) -> dict[str, Samples]:
    """Returns the seconds of every counted step.

    Args:
        runners: contestants by name, the same names on all ranks; None where this rank is not in.
        rounds: counted rounds.
        warmup: rounds before them.
        world: all ranks.
        on_round: called after each counted round.

    Returns:
        ``rounds`` samples a contestant, the same on all ranks.
    """
    samples = {name: Samples([], []) for name in runners}
    gc.collect()
    gc.disable()  # a collection would hit one contestant and not the others
    try:
        for index in range(warmup + rounds):
            began = time.perf_counter()
            own = {name: _sample(runners[name]) for name in _order([*runners], index)}
            table = torch.tensor([own[name] for name in runners], dtype=torch.float64)
            ranks = all_gather(table, world)  # (ranks, contestants, 2)
            if index >= warmup:
                _append(samples, ranks)
                on_round(index - warmup, samples)
            gc.collect()
            took_s = time.perf_counter() - began
            log.info("round %d of %d took %.1f s", index + 1, warmup + rounds, took_s)
    finally:
        gc.enable()
    return samples


def _append(samples: dict[str, Samples], ranks: torch.Tensor) -> None:
    """Adds a round: of each contestant the slowest rank, and the processor time of all."""
    slowest, cpu = ranks[..., 0].amax(0).tolist(), ranks[..., 1].sum(0).tolist()
    for sampled, step_s, cpu_s in zip(samples.values(), slowest, cpu, strict=True):
        sampled.step_s.append(step_s)
        sampled.cpu_s.append(cpu_s)


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
