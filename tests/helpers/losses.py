"""Losses of a user's own, and functions that are none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def charbonnier(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """A loss that torch lacks: a smooth l1."""
    terms = ((output - target).square() + 1e-6).sqrt()
    return {"none": terms, "sum": terms.sum(), "mean": terms.mean()}[reduction]


def noisy(output: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """A loss that draws random numbers."""
    return F.cross_entropy(output * torch.rand_like(output), labels, reduction=reduction)


def whole_only(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose terms depend on each other."""
    return F.cross_entropy(output - output.mean(), target)


def no_number(output: Tensor, target: Tensor) -> Tensor:
    """No loss."""
    return F.cross_entropy(output, target, reduction="none")
