"""Clips the gradients of a step by their norm over all parameters of the network.

Each number counts once, wherever it lies. After the sums of gradients all holders of a stage (its
tiles, replicas and both directions) have the same, so the first of them counts it; where the update
is divided, each counts what it moves:

    stage 0   rank 0  squares of all            rank 1  nothing
    stage 1   rank 2  squares of rows 0 to 9    rank 3  squares of the others
              one sum over the world, the event ``grad_norm`` of the plan; all ranks have its root

A parameter that several layers of a stage share has one gradient. As in
``torch.nn.utils.clip_grad_norm_``, gradients are multiplied by most / (norm + 1e-6), if that is
below 1. With a loss scale this comes behind :mod:`.loss_scale`, which has divided them by it.

Source:
    Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hires.comm import finish_streams, sum_all
from hires.parallel.gradients import GradientSync, StageGradients, flat
from hires.plan.groups import groups
from hires.plan.plan import Plan

SMALL = 1e-6
"""That torch adds to the norm, against a division by 0."""


class GradientClip:
    """Clips the gradients of one rank, in step with all others, to a norm of ``most``."""

    def __init__(self, most: float, sync: GradientSync, plan: Plan, rank: int) -> None:
        self.most, self.sync, self.rank = most, sync, rank
        self.holders = groups(plan)
        self.norm = 0.0  # of the last step, before it was clipped

    @torch.no_grad()
    def clip(self) -> None:
        """Finds the norm of all gradients, and multiplies those of this rank."""
        counted = [g for index, one in self.sync.by_group.items() for g in self._own(index, one)]
        norms = [norm.double() for norm in torch._foreach_norm(counted)] if counted else []
        squares = float(torch.stack(norms).square().sum()) if norms else 0.0
        finish_streams()
        self.norm = math.sqrt(sum_all(squares))
        factor = self.most / (self.norm + SMALL)
        if factor < 1:
            torch._foreach_mul_([flat(gradient) for gradient in self.sync.gradients()], factor)

    def _own(self, group: int, stage: StageGradients) -> list[Tensor]:
        # The gradients of a stage, as rows of numbers, that no other rank counts.
        holders = self.holders[group]
        if stage.shares:
            return stage.parts()[[*stage.shares].index(self.rank)]
        if holders[0] != self.rank:
            return []
        return [flat(stage.gradient(name)) for name in stage.parameters]
