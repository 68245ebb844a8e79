"""How do replicas come to the same running statistics?

They end as if one process had seen the replicas' microbatches one after the other. The update
r <- (1 - m) r + m s is affine, so that of each replica k is r_k = a r_0 + b_k, with a = (1 - m)^M
for M microbatches, and their composition a^R r_0 + sum_k a^(R-1-k) b_k needs one sum over replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.stage import StageModule


@dataclass
class _Statistic:
    """One running mean or variance."""

    tensor: Tensor
    decay: float
    """What one step of one replica leaves of the old value."""
    before: Tensor
    """Value at the start of the step."""


class RunningStatistics:
    """The running statistics of one rank's stage, merged over the replicas once a step.

    Args:
        context: the rank and its plan.
        module: the rank's stage.
        counters: ``num_batches_tracked`` of the stage's norms.
    """

    def __init__(self, context: Context, module: StageModule, counters: list[Tensor]) -> None:
        self.context = context
        self.counters = counters
        self.statistics = _statistics(context, module) if context.plan.num_replicas > 1 else []

    def begin_step(self) -> None:
        """Remembers the values from which all replicas start."""
        for statistic in self.statistics:
            statistic.before = statistic.tensor.clone()

    def contributions(self) -> list[Tensor]:
        """Returns this rank's terms, to be summed over all holders of the stage."""
        return [self._contribution(statistic) for statistic in self.statistics]

    @torch.no_grad()
    def end_step(self, totals: list[Tensor]) -> None:
        """Takes the summed terms over, and counts the microbatches of all replicas."""
        for statistic, total in zip(self.statistics, totals, strict=True):
            decay = statistic.decay**self.context.plan.num_replicas
            statistic.tensor.copy_(total.add_(statistic.before, alpha=decay))
        for counter in self.counters:
            counter.add_(self.context.plan.pieces)

    def _contribution(self, statistic: _Statistic) -> Tensor:
        """Returns this replica's term of one statistic; tile 0 speaks for its replica."""
        if self.context.tile != 0:
            return torch.zeros_like(statistic.tensor)
        later = self.context.plan.num_replicas - 1 - self.context.replica
        own = statistic.tensor - statistic.decay * statistic.before
        return own * statistic.decay**later


def _statistics(context: Context, module: StageModule) -> list[_Statistic]:
    """Returns the running statistics that the stage updates, each with its decay in one step."""
    decays: dict[str, float] = {}
    for node in module.nodes:
        if node.kind == "batch_norm" and node.args["training"] and node.args["running_mean"]:
            once = (1 - node.args["momentum"]) ** context.plan.num_microbatches
            for key in ("running_mean", "running_var"):
                name = node.args[key]["param"]
                decays[name] = decays.get(name, 1.0) * once
    return [_Statistic(module.tensors[n], d, module.tensors[n]) for n, d in decays.items()]
