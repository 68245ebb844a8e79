"""How do all holders of a stage come to the same running statistics?

They end as if one process had seen the microbatches of all replicas and directions one after the
other. The update r <- (1 - m) r + m s is linear, so after N microbatches r is
(1 - m)^N r_0 + sum_k (1 - m)^(N-1-k) m s_k: where several copies share the microbatches, each adds
up its own terms, and one sum over the copies completes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.stage import StageModule
from hires.plan.operators.reductions import updates_statistics


@dataclass
class _Statistic:
    """One running mean or variance."""

    tensor: Tensor
    decay: float
    """What one microbatch leaves of the old value."""
    before: Tensor
    """Value at the start of the step."""
    terms: Tensor
    """Sum of this rank's terms in the step."""


class RunningStatistics:
    """The running statistics of one stage on one rank, merged over all its copies once a step.

    Args:
        context: a slot of the rank that holds the stage.
        module: the rank's stage.
    """

    def __init__(self, context: Context, module: StageModule) -> None:
        plan = context.plan
        self.pieces = plan.pieces
        self.first = context.replica * plan.total_microbatches
        several = plan.num_replicas * plan.num_directions > 1
        self.statistics = _statistics(module) if several and plan.training else []

    @torch.no_grad()
    def begin_step(self) -> None:
        """Remembers the values from which all copies start."""
        for statistic in self.statistics:
            statistic.before.copy_(statistic.tensor)
            statistic.terms.zero_()

    @torch.no_grad()
    def before_forward(self) -> None:
        """Makes the next update leave nothing but the microbatch's own part."""
        for statistic in self.statistics:
            statistic.tensor.zero_()

    @torch.no_grad()
    def after_forward(self, microbatch: int, counts: bool) -> None:
        """Adds the part of a microbatch of this replica, weighed by those that come later.

        Args:
            microbatch: counted through all model passes of the replica.
            counts: whether this slot speaks for its copy; of several tiles, one does.
        """
        if not counts:
            return
        later = self.pieces - 1 - (self.first + microbatch)
        for statistic in self.statistics:
            statistic.terms.add_(statistic.tensor, alpha=statistic.decay**later)

    def contributions(self) -> list[Tensor]:
        """Returns this rank's terms, to be summed over all holders of the stage."""
        return [statistic.terms for statistic in self.statistics]

    @torch.no_grad()
    def end_step(self, totals: list[Tensor]) -> None:
        """Takes the summed terms over."""
        for statistic, total in zip(self.statistics, totals, strict=True):
            decay = statistic.decay**self.pieces
            statistic.tensor.copy_(total).add_(statistic.before, alpha=decay)


def _statistics(module: StageModule) -> list[_Statistic]:
    """Returns the running statistics that the stage updates, each with its decay."""
    decays: dict[str, float] = {}
    for node in module.nodes:
        if updates_statistics(node):
            for key in ("running_mean", "running_var"):
                name = node.args[key]["param"]
                decays[name] = decays.get(name, 1.0) * (1 - node.args["momentum"])
    # As .data: autograd has saved the statistics of microbatches in flight, though in training it
    # never reads them, and would take their new values for a mistake.
    held = {name: module.tensors[name].data for name in decays}
    return [_Statistic(t, decays[n], t.clone(), torch.zeros_like(t)) for n, t in held.items()]
