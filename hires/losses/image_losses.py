"""Losses that compare outputs with images or numbers, and functions of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hires.core.errors import ConfigError
from hires.core.losses import CLASSES, IMAGES, LOSSES, NUMBERS, Loss
from hires.losses.class_losses import labels_of

if TYPE_CHECKING:
    from torch import Tensor

    from hires.core.config.training_config import LossConfig


@LOSSES.register("l1")
class AbsoluteDifference(Loss):
    """The mean over all numbers."""

    summary = "Mean absolute difference of images or numbers"
    targets, also = IMAGES, NUMBERS

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the sum of the differences, and their number."""
        return with_count((output - target).abs())


@LOSSES.register("l2")
class SquaredDifference(Loss):
    """The mean over all numbers."""

    summary = "Mean square of the difference of images or numbers"
    targets, also = IMAGES, NUMBERS

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the sum of the squares, and their number."""
        return with_count((output - target).square())


@LOSSES.register("smooth_l1")
class SmoothDifference(Loss):
    """The mean over all numbers: half of the square up to 1, then the absolute less a half."""

    summary = "Mean difference of images or numbers, squared where it is below 1"
    targets, also = IMAGES, NUMBERS

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the sum of the terms, and their number."""
        from torch.nn.functional import smooth_l1_loss

        return with_count(smooth_l1_loss(output, target.to(output), reduction="none"))


@LOSSES.register("custom")
class OwnLoss(Loss):
    """A function of the user's; ``loss.targets`` says what it compares with."""

    summary = "A function of your own: loss.target=package.module:function"
    draws = True

    def __init__(self, keys: LossConfig) -> None:
        from hires.nets.custom import imported

        super().__init__(keys)
        self._function: Callable[..., Any] = imported(str(keys.target), "loss.target")

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the sum of the function's terms, and their number."""
        terms = self._function(output, self._target(output, target), reduction="none")
        return with_count(terms)

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns what the function makes of a whole output; ConfigError: it is no number."""
        from torch import Tensor

        made = self._function(output, self._target(output, target))
        if not isinstance(made, Tensor) or made.dim():
            what = f"a tensor {[*made.shape]}" if isinstance(made, Tensor) else type(made).__name__
            raise ConfigError(
                f"loss.target={self.keys.target} returns {what}; return a tensor of one number"
            )
        return made

    def require_parts(self) -> None:
        """Raises ConfigError where the function has no ``reduction``."""
        if not _reduces(self._function):
            raise ConfigError(
                f"loss.target={self.keys.target} has no argument reduction, by which ranks that "
                f'hold parts of the output get their own terms; add reduction="mean", and return '
                f'all terms for reduction="none", or use a layout whose last stage is one rank, as '
                f"parallel=sp+lp"
            )

    def _target(self, output: Tensor, target: Tensor) -> Tensor:
        return labels_of(output, target) if self.keys.compares == CLASSES else target


def with_count(terms: Tensor) -> Tensor:
    """Returns the sum of some terms, and their number."""
    import torch

    return torch.stack((terms.sum(), terms.new_tensor(float(terms.numel()))))


def _reduces(function: Callable[..., Any]) -> bool:
    try:
        return "reduction" in inspect.signature(function).parameters
    except ValueError:  # a function of C has no signature
        return False
