"""How does a row become something that one rank can run, and is its answer right?"""

from __future__ import annotations

import logging
from typing import Protocol

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

TOLERANCE = 1e-3
"""Largest relative error of an answer. fp32 sums in another order differ by 1e-5 in the first step
of a ResNet-101; the second step, after an update, by some 1e-4. A wrong gradient shows as 1e-2."""

log = logging.getLogger(__name__)


class Steps(Protocol):
    """A built row on one rank."""

    optimizer: torch.optim.Optimizer | None
    parameters: list[nn.Parameter]

    def step(self) -> Tensor | None:
        """Runs one step; returns the mean loss (1) or outputs (images, classes), if known here."""


class HiresSteps:
    """A layout of hires on one rank, exactly as ``hires run`` executes it."""

    def __init__(self, config: RunConfig, plan: Plan, rank: int) -> None:
        self.engine = build_rank(config, plan, rank, 1)
        self.feed = Replay(self.engine.loader)
        self.optimizer = self.engine.optimizer
        self.parameters = list(self.engine.module.parameters.values())

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
        for parameter in self.steps.parameters:
            parameter.grad = None
        torch.set_num_threads(1)

    def stand_still(self) -> None:
        """Makes later steps leave the weights as they are, at the same cost."""
        optimizer = self.steps.optimizer
        for group in optimizer.param_groups if optimizer else ():
            group["lr"] = 0.0


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


class Judge:
    """Compares the first answers of every row with those of a plain module in one process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._expected: dict[tuple[int, int], list[Tensor]] = {}

    def error(self, row: Contestant, runner: RankRunner | None) -> float | None:
        """Returns the largest relative error of two steps, None if there is nothing to compare.

        All ranks call it together; in training the second step tells whether the gradients and the
        update of the first were right.
        """
        num_steps = 2 if row.config.task.name == "train" else 1
        found = [self._answer(runner) for _ in range(num_steps)]
        if runner is not None:
            runner.stand_still()
        if self.rank != 0:
            barrier()
            return None
        worst = None
        if row.checked:
            expected = self._reference(row.config, num_steps)
            worst = max(_error(a, b) for a, b in zip(found, expected, strict=True))
            log.info("%s: largest relative error %.1e", row.name, worst)
        barrier()
        return worst

    def _answer(self, runner: RankRunner | None) -> Tensor:
        """Runs one step on all ranks; returns their answers one after the other."""
        own = None
        if runner is not None:
            runner.prepare()
            own = runner.step()
            runner.tidy()
        gathered: list[Tensor | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return torch.cat([answer for answer in gathered if answer is not None])

    def _reference(self, config: RunConfig, num_steps: int) -> list[Tensor]:
        """Returns the answers of one process to the same images in the same microbatches."""
        key = config.batch, config.parallel.replicas * config.parallel.microbatches
        if key not in self._expected:
            steps = peers.reference_steps(config)
            self._expected[key] = [steps.step().clone() for _ in range(num_steps)]
        return self._expected[key]


def _error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference over the largest expected value; NaN counts as infinite.

    Losses of several ranks are averaged; outputs that several tiles hold are compared each.
    """
    if found.dim() == 1:
        found = found.mean(0, keepdim=True)
    else:
        expected = expected.repeat(len(found) // len(expected), 1)
    if found.shape != expected.shape:
        return float("inf")
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")
