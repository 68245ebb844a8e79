"""``torch.compile`` of the plain module, its weights frozen: inference alone."""

from __future__ import annotations

import torch
from torch import Tensor

from hires.bench.bench_rows import BenchRow
from hires.bench.peers import peer_module
from hires.bench.race import Runner
from hires.engine.device import RankDevice

CONVERTED = True


def lacks(row: BenchRow) -> str:
    """Returns why it cannot run a row."""
    return "weights that are trained cannot be frozen" if row.training else peer_module.lacks(row)


def build(row: BenchRow, rank: int, device: RankDevice) -> Runner:
    """Returns the compiled module; the 1x1 trick is of no use to a compiler."""
    module = device.place_module(peer_module.plain_module(row.config, trick=False))
    return CompiledSteps(module, row, rank, device)


class CompiledSteps(peer_module.ModuleSteps):
    """Steps that torch's compiler made, which are compiled in the first one."""

    def step(self) -> Tensor:
        """Returns the outputs (images, classes)."""
        import torch._inductor.config as inductor

        inductor.freezing = True
        if not hasattr(self, "compiled"):
            self.compiled = torch.compile(self.module)
        with torch.no_grad():
            return torch.cat([self.compiled(images) for images, _ in self.microbatches])
