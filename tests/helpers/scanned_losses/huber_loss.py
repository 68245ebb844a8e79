"""A loss that hires does not list, as a user would add it in ``hires.losses``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.core.losses import IMAGES, LOSSES, Loss

if TYPE_CHECKING:
    from torch import Tensor

    from hires.core.config.training_config import LossConfig


@LOSSES.register("huber")
class Huber(Loss):
    """The mean over all numbers."""

    summary = "Huber's loss of images"
    targets = IMAGES

    def __init__(self, keys: LossConfig, delta: float = 1.0) -> None:
        super().__init__(keys)
        self.delta = delta

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        import torch
        import torch.nn.functional as F

        total = F.huber_loss(output, target, reduction="sum", delta=self.delta)
        return torch.stack((total, total.new_tensor(float(output.numel()))))
