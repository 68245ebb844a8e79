"""Scales the loss of a training in fp16 against overflow, and clips gradients by their norm.

fp16 has no number between 0 and 6e-8 and none above 65504. Multiplied by a large factor, small
gradients are no zeros; if a large one overflows, the step is skipped and the factor halved:

    backward(loss * scale)   sums over ranks   gradients / scale   all finite?   update or skip

All ranks take one answer, the event ``agree`` of the plan, for a gradient that overflows on one
rank is summed over the holders of its own stage only. As with ``torch.amp.GradScaler`` a skipped
step leaves parameters and optimiser as they were, while running statistics and their counters have
moved in the forward pass.

A norm is over all parameters of the network, and each number counts once, wherever it lies. After
the sums of gradients all holders of a stage (its tiles, replicas and both directions) have the
same, so the first of them counts it; where the update is divided, each counts what it moves:

    stage 0   rank 0  squares of all            rank 1  nothing
    stage 1   rank 2  squares of rows 0 to 9    rank 3  squares of the others
              one sum over the world, the event ``grad_norm`` of the plan; all ranks have its root

As in ``torch.nn.utils.clip_grad_norm_``, gradients are multiplied by most / (norm + 1e-6), if that
is below 1, behind the division by a loss scale.

Source:
    Micikevicius et al., "Mixed precision training", ICLR 2018; ``torch.amp.GradScaler``. Pascanu et
    al., "On the difficulty of training recurrent neural networks", ICML 2013.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hires.comm import finish_streams, max_all, sum_all
from hires.core.errors import LossError
from hires.parallel.gradients import GradientSync, StageGradients, flat
from hires.plan.groups import process_groups
from hires.plan.plan import Plan

FIRST_SCALE = 2.0**16
FACTOR = 2.0
LARGEST_SCALE = 2.0**127  # a number of fp32, as gradients are
MOST_SKIPPED = 32
"""Steps in a row: with a dynamic scale, which is then 2^-32 of what it was, the network overflows
whatever the scale."""


class LossScale:
    """The factor of the loss, equal on all ranks.

    It is ``fixed`` if that is given; else it is halved with every overflow, and doubled after
    ``interval`` steps without one.
    """

    def __init__(self, interval: int, fixed: float | None = None) -> None:
        self.interval, self.fixed = interval, fixed
        self.scale = FIRST_SCALE if fixed is None else fixed
        self.good_steps = 0  # since the scale has changed
        self.skipped_in_row = 0
        self.skipped = 0  # steps of the run, also of the runs that it continues
        self.skips = False  # whether the step that runs now leaves the parameters as they are

    @torch.no_grad()
    def agree(self, gradients: Iterable[Tensor]) -> None:
        """Divides a rank's gradients by the scale; all ranks agree whether the step is skipped."""
        own = [*gradients]
        overflows = torch.zeros(1, device=own[0].device) if own else torch.zeros(1)
        for dtype in {gradient.dtype for gradient in own}:
            same = [gradient for gradient in own if gradient.dtype == dtype]
            inverse = torch.full_like(overflows, 1 / self.scale)
            torch._amp_foreach_non_finite_check_and_unscale_(same, overflows, inverse)
        finish_streams()
        self.skips = bool(max_all(int(overflows)))

    def update(self) -> None:
        """Chooses the scale of the next step."""
        self.skipped_in_row = self.skipped_in_row + 1 if self.skips else 0
        self.skipped += self.skips
        self.good_steps = 0 if self.skips else self.good_steps + 1
        if self.fixed is not None:
            return
        if self.skips:
            self.scale /= FACTOR
        elif self.good_steps >= self.interval:  # more: of a run with a longer interval
            self.scale = min(self.scale * FACTOR, LARGEST_SCALE)
            self.good_steps = 0

    def require_progress(self) -> None:
        """Raises LossError if no scale seems small enough."""
        if self.skipped_in_row >= MOST_SKIPPED:
            raise LossError(
                f"the gradients of {MOST_SKIPPED} steps in a row are not finite, the last with a "
                f"loss scale of {self.scale * FACTOR if self.fixed is None else self.scale:g}; "
                f"precision=bf16 has the range of fp32"
            )

    def state(self) -> Tensor:
        """Returns what a checkpoint keeps, (4,) in float64."""
        counts = [self.good_steps, self.skipped_in_row, self.skipped]
        return torch.tensor([self.scale, *counts], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Goes on as a checkpoint says; a fixed scale stays as it is."""
        scale, good_steps, in_row, skipped = state.tolist()
        if self.fixed is None and math.isfinite(scale) and scale > 0:
            self.scale = scale
        self.good_steps, self.skipped_in_row = int(good_steps), int(in_row)
        self.skipped = int(skipped)


SMALL = 1e-6
"""That torch adds to the norm, against a division by 0."""


class GradientClip:
    """Clips the gradients of one process, in step with all others, to a norm of ``most``."""

    def __init__(self, most: float, sync: GradientSync, plan: Plan, process: int) -> None:
        self.most, self.sync, self.rank = most, sync, process
        self.holders = process_groups(plan)
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
