"""Computes the learning rate of a step: a function of the config and the step alone.

    rate          . - .                      one_cycle with a warm-up of 0
                .       .
              .            .  .
            .                     .  .  .    steps

The values are those of ``torch.optim.lr_scheduler``: ``LinearLR`` for the warm-up, then ``StepLR``,
``CosineAnnealingLR`` or ``OneCycleLR``, joined by ``SequentialLR``.

Source:
    Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017; Smith,
    Topin, "Super-convergence: very fast training of neural networks using large learning rates",
    2018; Goyal et al., "Accurate, large minibatch SGD", 2017 (warm-up and linear scaling).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import LrScheduleConfig

Curve = Callable[[LrScheduleConfig, float, int, int], float]
"""From keys, the largest rate, a step and the number of all steps to a rate; both without warm-up.
The step is below that number."""


def learning_rate(config: RunConfig, step: int) -> float:
    """Returns the learning rate of a step, the first one is 0."""
    keys, largest = config.lr_schedule, config.optimizer.lr
    if config.optimizer.scale_lr:
        largest *= config.parallel.replicas
    if step < keys.warmup:
        return largest * (keys.warmup_begin + (1 - keys.warmup_begin) * step / keys.warmup)
    total = (keys.steps or config.steps) - keys.warmup
    return CURVES[keys.name](keys, largest, step - keys.warmup, total)


def _constant(keys: LrScheduleConfig, largest: float, step: int, total: int) -> float:
    return largest


def _step(keys: LrScheduleConfig, largest: float, step: int, total: int) -> float:
    return float(largest * keys.gamma ** (step // keys.step_size))


def _cosine(keys: LrScheduleConfig, largest: float, step: int, total: int) -> float:
    return _half_cosine(largest, keys.final, min(step, total) / total)


def _one_cycle(keys: LrScheduleConfig, largest: float, step: int, total: int) -> float:
    # The first step has the first rate, the last one the last; where the top is need be no step.
    top, end, first = keys.rise * total - 1, total - 1, largest / keys.first_divisor
    step = min(step, end)
    if step <= top:
        return _half_cosine(first, largest, step / top if top else 1.0)
    return _half_cosine(largest, first / keys.last_divisor, (step - top) / (end - top))


def _half_cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


CURVES: dict[str, Curve] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
}
"""Value of ``lr_schedule`` -> the rate behind the warm-up."""
