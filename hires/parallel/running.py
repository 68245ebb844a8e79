"""Merges the running statistics of a stage over all ranks that hold it.

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
from hires.plan.groups import running_decays


@dataclass
class _Statistic:
    """One running mean or variance."""

    tensor: Tensor
    decay: float
    """What one microbatch leaves of the old value."""
    before: Tensor
    """Value at the start of the step."""
    terms: Tensor
    """Sum of this rank's terms in the step; at its end, of all ranks'."""


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
        decays = running_decays(plan, context.stage.index) if several and plan.training else {}
        # As .data: autograd has saved the statistics of microbatches in flight, though in training
        # it never reads them, and would take their new values for a mistake.
        held = {name: module.tensors[name].data for name in decays}
        self.statistics = {
            name: _Statistic(tensor, decays[name], tensor.clone(), torch.zeros_like(tensor))
            for name, tensor in held.items()
        }

    @torch.no_grad()
    def begin_step(self) -> None:
        """Remembers the values from which all copies start."""
        for statistic in self.statistics.values():
            statistic.before.copy_(statistic.tensor)
            statistic.terms.zero_()

    @torch.no_grad()
    def before_forward(self) -> None:
        """Makes the next update leave nothing but the microbatch's own part."""
        for statistic in self.statistics.values():
            statistic.tensor.zero_()

    @torch.no_grad()
    def after_forward(self, microbatch: int, counts: bool) -> None:
        """Adds the part of a microbatch of this replica, weighed by those that come later.

        Args:
            microbatch: counted through all model passes of the replica.
            counts: whether this slot's statistics count; of several tiles, one's do.
        """
        if not counts:
            return
        later = self.pieces - 1 - (self.first + microbatch)
        for statistic in self.statistics.values():
            statistic.terms.add_(statistic.tensor, alpha=statistic.decay**later)

    @torch.no_grad()
    def end_step(self) -> None:
        """Takes over the terms, which have been summed over all holders of the stage."""
        for statistic in self.statistics.values():
            decay = statistic.decay**self.pieces
            statistic.tensor.copy_(statistic.terms).add_(statistic.before, alpha=decay)
