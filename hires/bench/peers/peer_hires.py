"""A layout of hires, exactly as ``hires run`` executes it."""

from __future__ import annotations

import itertools

from torch import Tensor

from hires.bench.bench_rows import PEERS, BenchRow, PeerSteps
from hires.engine.build import build_rank
from hires.engine.device import RankDevice
from hires.engine.verify import part_of
from hires.engine.weights_file import open_weights
from hires.parallel.executor import StepResult


@PEERS.register("hires")
class HiresSteps(PeerSteps):
    """The steps of a layout on one rank; its microbatches are repeated for ever."""

    deterministic = True

    def __init__(self, row: BenchRow, rank: int, device: RankDevice) -> None:
        super().__init__(row, rank, device)
        assert row.plan is not None
        weights = open_weights(row.config.weights) if row.config.weights else None
        self.engine = build_rank(row.config, row.plan, rank, 1, device, weights=weights)
        self.feed = [itertools.cycle([*loader]) for loader in self.engine.loaders]
        self.parameters = self.engine.parameters
        self.first = self.engine.context.replica * row.plan.total_microbatches
        self.result = StepResult()

    def step(self) -> None:
        """Runs one step."""
        self.result = self.engine.executor.step(self.feed, keep_outputs=not self.row.training)

    def tensors(self) -> dict[str, Tensor]:
        """Returns what this rank has of a step."""
        kind, values = "loss", self.result.losses
        if not self.row.training:
            kind, values = "output", self.result.outputs
        named = {f"{kind}/{self.first + number}": value for number, value in values.items()}
        return named | super().tensors()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Returns the part of a tensor that this rank has."""
        return part_of(self.engine, name, whole)

    def after_step(self) -> None:
        """Frees results and gradients."""
        self.result = StepResult()
        super().after_step()

    def close(self) -> None:
        """Ends its loaders."""
        self.engine.close()
