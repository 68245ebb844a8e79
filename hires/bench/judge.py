"""Compares every row with a plain module in one process before it is timed.

Loss or outputs of its first step are compared as it is timed. In that precision gradients may be
noise: those of an AmoebaNet with its first weights move by more than their size where sums have
another order. So they are compared element by element where there is none, in float64, in a step of
the same network and layout on a small image.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.bench.contestants import Contestant
from hires.bench.runners import HiresSteps, build, reference_steps
from hires.bench.timing import Runner
from hires.comm import barrier
from hires.core.config.run_config import RunConfig
from hires.engine.device import RankDevice, to_host
from hires.engine.verify import largest_values, tensor_error
from hires.engine.verify_bounds import EXACT

VALUE_TOLERANCE = 1e-3
"""Largest relative error of loss or outputs as they are timed."""
EXACT_TOLERANCE = EXACT.most
"""Largest relative error of an element in float64. A sum over tiles that is missing, or a gradient
that is zero or doubled, is off by 0.1 and more."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankAnswer:
    """What one rank finds: loss (1) or outputs as they are timed, and those on a small image."""

    value: Tensor | None = None
    small: Tensor | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    """The largest error of an element of each gradient that it holds."""


@dataclass(frozen=True)
class Deviation:
    """How far a row is from what one process computes; infinite where nothing came, or NaN."""

    value: float
    """Largest error of loss or outputs as they are timed, over the largest expected value."""
    exact: float
    """The same in float64, on a small image."""
    gradient: float
    """Largest error of an element of a gradient there."""

    @property
    def ok(self) -> bool:
        """Whether the row is right."""
        return self.value <= VALUE_TOLERANCE and max(self.exact, self.gradient) <= EXACT_TOLERANCE


Reference = tuple[Tensor, dict[str, Tensor]]
"""Loss or outputs, and the gradients, of one process."""


class Judge:
    """Compares the first step of every row with that of a plain module in one process."""

    def __init__(self, rank: int, device: RankDevice) -> None:
        self.rank, self.device = rank, device
        self._expected: dict[tuple[Any, ...], Reference] = {}

    def judge(self, row: Contestant, runner: Runner | None) -> Deviation | None:
        """Returns on rank 0 whether a row's step is right; all ranks call it together."""
        if row.twin is None:
            return None
        own, twin = RankAnswer(), build(row.twin, self.rank, self.device)
        if runner is not None and twin is not None:
            value, (small, gradients) = _step(runner)[0], _step(twin, keeps=True)
            expected = self._reference(row.twin.config)[1]
            largest = largest_values(expected)
            errors = {n: tensor_error(g, expected[n], n, largest) for n, g in gradients.items()}
            own = RankAnswer(value, small, errors)
        if isinstance(twin, HiresSteps):
            twin.engine.close()
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, own)
        deviation = None
        if self.rank == 0:
            value, (small, expected) = (
                self._reference(row.config)[0],
                self._reference(row.twin.config),
            )
            deviation = compare(answers, value, small, [*expected])
            shown = deviation.value, deviation.exact, deviation.gradient
            log.info("%s: error %.1e, in float64 %.1e, of gradients %.1e", row.name, *shown)
        barrier()
        return deviation

    def _reference(self, config: RunConfig) -> Reference:
        # What one process answers to the same microbatches.
        key = config.precision.name, config.batch, config.parallel.pieces
        if key not in self._expected:
            keeps = config.precision.name == "fp64"
            value, gradients = _step(reference_steps(config), keeps)
            assert value is not None
            self._expected[key] = value, gradients
        return self._expected[key]


def compare(
    answers: list[RankAnswer], value: Tensor, small: Tensor, gradients: list[str]
) -> Deviation:
    """Returns how far the answers of all ranks are from those of one process.

    Every one of the ``gradients`` must be on some rank.
    """
    errors = [0.0]
    for name in gradients:
        errors += [one.gradients[name] for one in answers if name in one.gradients] or [math.inf]
    return Deviation(
        _value_error([one.value for one in answers if one.value is not None], value),
        _value_error([one.small for one in answers if one.small is not None], small),
        max(errors),
    )


def _value_error(values: list[Tensor], expected: Tensor) -> float:
    """Returns the largest difference over the largest expected value."""
    if not values:
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


def _step(runner: Runner, keeps: bool = False) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Runs one step; returns what this rank holds then, on the host; gradients if it ``keeps``."""
    runner.prepare()
    value = runner.step()
    held = {f"gradients/{name}": p.grad for name, p in runner.parameters.items() if keeps}
    gradients = {name: to_host(grad).clone() for name, grad in held.items() if grad is not None}
    runner.tidy()
    return None if value is None else to_host(value), gradients
