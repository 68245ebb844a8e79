"""How does a row become something that one rank can run, and is its answer right?"""

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
from hires.bench.feed import Replay
from hires.comm import barrier
from hires.core.config import RunConfig
from hires.engine.build import build_rank
from hires.engine.run import run_step
from hires.plan.plan import Plan

TOLERANCE = 1e-2
"""Largest relative error of a row. In fp32 another order of summation moves a ResNet-101
by 1e-5 and the gradients of its first layers by 1e-3; a gradient that is not summed over tiles or
not averaged over replicas is off by more than 1e-1."""
FLOOR = 1e-3
"""A gradient whose norm is below this part of the largest is compared with that part."""

log = logging.getLogger(__name__)


class Steps(Protocol):
    """A built row on one rank."""

    optimizer: torch.optim.Optimizer | None
    parameters: dict[str, nn.Parameter]
    """Those that this rank holds, by name."""

    def step(self) -> Tensor | None:
        """Runs one step; returns the mean loss (1) or outputs (images, classes), if known here."""


class HiresSteps:
    """A layout of hires on one rank, exactly as ``hires run`` executes it."""

    def __init__(self, config: RunConfig, plan: Plan, rank: int) -> None:
        self.engine = build_rank(config, plan, rank, 1)
        self.feed = Replay(self.engine.loader)
        self.optimizer = self.engine.optimizer
        self.parameters = self.engine.module.parameters

    def step(self) -> Tensor | None:
        """Runs one step; returns what this rank knows of the answer."""
        if self.engine.context.plan.training:
            loss = run_step(self.engine, self.feed)
            return None if loss is None else torch.tensor([loss])
        outputs = self.engine.executor.step(self.feed, keep_outputs=True).outputs
        return torch.cat(outputs) if outputs else None


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
class Answer:
    """What one rank knows after one step."""

    value: Tensor | None
    """Mean loss (1) or outputs (images, classes)."""
    gradients: dict[str, float]
    """Norm of the gradient of every parameter that the rank holds."""


class Judge:
    """Compares the first step of every row with that of a plain module in one process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._expected: dict[tuple[int, int], Answer] = {}

    def error(self, row: Contestant, runner: RankRunner | None) -> float | None:
        """Returns the largest relative error of a step, None if there is nothing to compare.

        All ranks call it together; rank 0 gets the answer.
        """
        own = Answer(None, {}) if runner is None else _answer(runner)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        worst = None
        if self.rank == 0 and row.checked:
            worst = compare(found, self._reference(row.config))
            log.info("%s: largest relative error %.1e", row.name, worst)
        barrier()
        return worst

    def _reference(self, config: RunConfig) -> Answer:
        """Returns what one process answers to the same images in the same microbatches."""
        key = config.batch, config.parallel.replicas * config.parallel.microbatches
        if key not in self._expected:
            self._expected[key] = _answer(RankRunner(peers.reference_steps(config), threads=1))
        return self._expected[key]


def compare(found: list[Answer], expected: Answer) -> float:
    """Returns the largest error of all ranks' answers over what was expected; NaN is infinite."""
    errors = [_value_error([a.value for a in found if a.value is not None], expected.value)]
    floor = FLOOR * max(expected.gradients.values(), default=0.0)
    for name, norm in expected.gradients.items():
        norms = [answer.gradients[name] for answer in found if name in answer.gradients]
        scale = max(norm, floor) or 1.0
        errors += [abs(other - norm) / scale for other in norms] or [math.inf]
    return max(error if math.isfinite(error) else math.inf for error in errors)


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


def _answer(runner: RankRunner) -> Answer:
    """Runs one step; returns what this rank knows then."""
    runner.prepare()
    value = runner.step()
    gradients = {
        name: float(parameter.grad.norm())
        for name, parameter in runner.steps.parameters.items()
        if parameter.grad is not None
    }
    runner.tidy()
    return Answer(value, gradients)
