"""Compares the first step of every row with that of a plain module in one process on the CPU."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.bench.contestants import Contestant
from hires.bench.runners import reference_steps
from hires.bench.timing import Runner
from hires.comm import barrier
from hires.core.config.run_config import RunConfig
from hires.engine.device import to_host

VALUE_TOLERANCE = 1e-3
"""Largest relative error of loss or outputs."""
GRADIENT_TOLERANCE = 0.02
"""Largest relative error of the norm of a gradient, beyond the network's own noise."""
NOISE_FACTOR = 3.0
"""Sums in another order move a network's gradients: those of a ResNet-101 with its first weights by
0.08 in fp32. How far is measured, with a second thread; a row may be that many times as far off. A
sum over tiles or a mean over replicas that is missing is off by 0.3 and more."""
FLOOR = 1e-3
"""A gradient whose norm is below this part of the largest is compared with that part."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankAnswer:
    """What one rank holds after one step: loss (1) or outputs, and the norm of each gradient."""

    value: Tensor | None
    gradients: dict[str, float]


@dataclass(frozen=True)
class Deviation:
    """How far a row is from what one process computes; infinite where nothing came, or NaN."""

    value: float
    """Largest error of loss or outputs, over the largest expected value."""
    gradient: float
    """Largest relative error of the norm of a gradient."""
    ok: bool
    """Whether the row is right."""


class Judge:
    """Compares the first step of every row with that of a plain module in one process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._expected: dict[tuple[int, int], tuple[RankAnswer, float]] = {}

    def judge(self, row: Contestant, runner: Runner | None) -> Deviation | None:
        """Returns on rank 0 whether a row's step is right; all ranks call it together."""
        own = RankAnswer(None, {}) if runner is None else _answer(runner)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, own)
        deviation = None
        if self.rank == 0 and row.checked:
            deviation = compare(answers, *self._reference(row.config))
            errors = deviation.value, deviation.gradient
            log.info("%s: error %.1e, of gradients %.1e", row.name, *errors)
        barrier()
        return deviation

    def _reference(self, config: RunConfig) -> tuple[RankAnswer, float]:
        """Returns what one process answers to the same microbatches, and the gradients' noise."""
        key = config.batch, config.parallel.pieces
        if key not in self._expected:
            steps = reference_steps(config)
            expected = _answer(steps)
            steps.threads = 2
            self._expected[key] = expected, compare([_answer(steps)], expected).gradient
        return self._expected[key]


def compare(answers: list[RankAnswer], expected: RankAnswer, noise: float = 0.0) -> Deviation:
    """Returns how far the answers of all ranks are from that of one process.

    ``noise`` is the relative error of gradients that another order of summation makes.
    """
    value = _value_error([a.value for a in answers if a.value is not None], expected.value)
    floor = FLOOR * max(expected.gradients.values(), default=0.0)
    errors = [0.0]
    for name, norm in expected.gradients.items():
        norms = [answer.gradients[name] for answer in answers if name in answer.gradients]
        scale = max(norm, floor) or 1.0
        errors += [abs(other - norm) / scale for other in norms] or [math.inf]
    gradient = max(error if math.isfinite(error) else math.inf for error in errors)
    limit = GRADIENT_TOLERANCE + NOISE_FACTOR * noise
    return Deviation(value, gradient, ok=value <= VALUE_TOLERANCE and gradient <= limit)


def _value_error(values: list[Tensor], expected: Tensor | None) -> float:
    """Returns the largest difference over the largest expected value."""
    if not values or expected is None:
        return math.inf
    got = torch.cat(values)
    if got.dim() == 1:  # losses, of several replicas
        got = got.mean(0, keepdim=True)
    else:  # outputs, which several tiles may hold
        expected = expected.repeat(len(got) // len(expected), 1)
    if got.shape != expected.shape:
        return math.inf
    error = float((got - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf  # NaN compares with nothing


def _answer(runner: Runner) -> RankAnswer:
    """Runs one step; returns what this rank holds then."""
    runner.prepare()
    value = runner.step()
    held = {name: parameter.grad for name, parameter in runner.parameters.items()}
    gradients = {name: float(grad.norm()) for name, grad in held.items() if grad is not None}
    runner.tidy()
    return RankAnswer(None if value is None else to_host(value), gradients)
