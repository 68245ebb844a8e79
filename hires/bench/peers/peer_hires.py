"""A layout of hires, exactly as ``hires run`` executes it."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hires.bench.bench_rows import BenchRow
from hires.bench.race import Runner
from hires.core.config.run_config import RunConfig
from hires.engine.build import build_rank
from hires.engine.device import RankDevice
from hires.engine.weights_file import open_weights
from hires.plan.plan import Plan


def build(row: BenchRow, rank: int, device: RankDevice) -> HiresSteps:
    """Returns the layout on one rank."""
    assert row.plan is not None
    return HiresSteps(row.config, row.plan, rank, device)


class HiresSteps(Runner):
    """The steps of a layout on one rank; its microbatches are repeated for ever."""

    deterministic = True

    def __init__(
        self, config: RunConfig, plan: Plan, rank: int, device: RankDevice | None = None
    ) -> None:
        weights = open_weights(config.weights) if config.weights else None
        self.engine = build_rank(config, plan, rank, 1, device, weights=weights)
        self.feed = [itertools.cycle([*loader]) for loader in self.engine.loaders]
        self.parameters = self.engine.parameters

    def step(self) -> Tensor | None:
        """Runs one step; returns what this rank has of the loss (1) or the outputs."""
        if self.engine.context.plan.training:
            loss = self.engine.executor.step(self.feed).loss
            return None if loss is None else torch.tensor([loss], dtype=torch.float64)
        outputs = self.engine.executor.step(self.feed, keep_outputs=True).outputs
        return torch.cat([*outputs.values()]) if outputs else None

    def close(self) -> None:
        """Ends its loaders."""
        self.engine.close()
