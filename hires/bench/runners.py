"""Builds a row as one rank runs it, and compares its first step with that of a plain module."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hires.bench import peers
from hires.bench.contestants import Contestant
from hires.comm import barrier
from hires.core.config.run_config import RunConfig
from hires.engine.build import build_rank
from hires.engine.optimizer import FusedSGD
from hires.plan.plan import Plan

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


class Steps(Protocol):
    """A built row on one rank."""

    optimizer: FusedSGD | None
    parameters: dict[str, nn.Parameter]
    """Those that this rank holds, by name."""

    def step(self) -> Tensor | None:
        """Runs one step; returns the mean loss (1) or outputs (images, classes), if known here."""


class HiresSteps:
    """A layout of hires on one rank, exactly as ``hires run`` executes it."""

    def __init__(self, config: RunConfig, plan: Plan, rank: int) -> None:
        self.engine = build_rank(config, plan, rank, 1)
        self.feed = peers.Replay(self.engine.loader.by_direction)
        self.optimizer = self.engine.optimizer
        self.parameters = self.engine.parameters

    def step(self) -> Tensor | None:
        """Runs one step; returns what this rank knows of the answer."""
        if self.engine.context.plan.training:
            loss = self.engine.executor.step(self.feed).loss
            return None if loss is None else torch.tensor([loss])
        outputs = self.engine.executor.step(self.feed, keep_outputs=True).outputs
        return torch.cat([*outputs.values()]) if outputs else None


class RankRunner:
    """A built row with its number of threads; what the stopwatch runs."""

    def __init__(self, steps: Steps, threads: int) -> None:
        self.steps = steps
        self.threads = threads

    def prepare(self) -> None:
        """Sets the number of threads."""
        torch.set_num_threads(self.threads)

    def step(self) -> Tensor | None:
        """Runs one step."""
        return self.steps.step()

    def tidy(self) -> None:
        """Lets the gradients go, so that all rows fit into memory together."""
        for parameter in self.steps.parameters.values():
            parameter.grad = None
        torch.set_num_threads(1)


def build(row: Contestant, rank: int) -> RankRunner | None:
    """Returns a row as this rank runs it; None if it is not in. All ranks call it together."""
    if rank >= row.num_ranks:
        return None
    if row.kind in ("hires", "pipelining"):
        assert row.plan is not None
        make = HiresSteps if row.kind == "hires" else peers.PipelineSteps
        return RankRunner(make(row.config, row.plan, rank), row.threads)
    make_peer = peers.ddp_steps if row.kind == "ddp" else peers.module_steps
    return RankRunner(make_peer(row.config, rank, **row.settings), row.threads)


@dataclass(frozen=True)
class RankAnswer:
    """What one rank knows after one step."""

    value: Tensor | None
    """Mean loss (1) or outputs (images, classes)."""
    gradients: dict[str, float]
    """Norm of the gradient of every parameter that the rank holds."""


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

    def judge(self, row: Contestant, runner: RankRunner | None) -> Deviation | None:
        """Returns whether a row's step is right, None if there is nothing to compare.

        All ranks call it together; rank 0 gets the answer.
        """
        own = RankAnswer(None, {}) if runner is None else _answer(runner)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        deviation = None
        if self.rank == 0 and row.checked:
            deviation = compare(found, *self._reference(row.config))
            log.info(
                "%s: error %.1e, of gradients %.1e", row.name, deviation.value, deviation.gradient
            )
        barrier()
        return deviation

    def _reference(self, config: RunConfig) -> tuple[RankAnswer, float]:
        """Returns what one process answers to the same microbatches, and the gradients' noise."""
        key = config.batch, config.parallel.pieces
        if key not in self._expected:
            steps = peers.reference_steps(config)
            expected, other = (_answer(RankRunner(steps, threads)) for threads in (1, 2))
            self._expected[key] = expected, compare([other], expected).gradient
        return self._expected[key]


def compare(found: list[RankAnswer], expected: RankAnswer, noise: float = 0.0) -> Deviation:
    """Returns how far the answers of all ranks are from what was expected.

    Args:
        found: of every rank.
        expected: of one process.
        noise: relative error of gradients that another order of summation makes.
    """
    values = [answer.value for answer in found if answer.value is not None]
    value = _bad_is_infinite(_value_error(values, expected.value))
    floor = FLOOR * max(expected.gradients.values(), default=0.0)
    errors = [0.0]
    for name, norm in expected.gradients.items():
        norms = [answer.gradients[name] for answer in found if name in answer.gradients]
        scale = max(norm, floor) or 1.0
        errors += [abs(other - norm) / scale for other in norms] or [math.inf]
    gradient = max(map(_bad_is_infinite, errors))
    limit = GRADIENT_TOLERANCE + NOISE_FACTOR * noise
    return Deviation(value, gradient, ok=value <= VALUE_TOLERANCE and gradient <= limit)


def _bad_is_infinite(error: float) -> float:
    """Returns an error, infinite for NaN, which compares with nothing."""
    return error if math.isfinite(error) else math.inf


def _value_error(found: list[Tensor], expected: Tensor | None) -> float:
    """Returns the largest difference over the largest expected value.

    Losses of several ranks are averaged; outputs that several tiles hold are compared each.
    """
    if not found or expected is None:
        return math.inf
    got = torch.cat(found)
    if got.dim() == 1:
        got = got.mean(0, keepdim=True)
    else:
        expected = expected.repeat(len(got) // len(expected), 1)
    if got.shape != expected.shape:
        return math.inf
    return float((got - expected).abs().max() / expected.abs().max())


def _answer(runner: RankRunner) -> RankAnswer:
    """Runs one step; returns what this rank knows then."""
    runner.prepare()
    value = runner.step()
    gradients = {
        name: float(parameter.grad.norm())
        for name, parameter in runner.steps.parameters.items()
        if parameter.grad is not None
    }
    runner.tidy()
    return RankAnswer(value, gradients)
