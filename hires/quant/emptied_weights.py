"""Empties weights that all kernels keep in an order of their own: two copies are one too many.

What is left has the shape and the type, for arithmetic of shapes, and one number for all places.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def empty(weight: Tensor) -> None:
    """Releases the memory of a weight, for all of its holders; its number is then NaN, or 0."""
    number = float("nan") if weight.is_floating_point() else 0
    weight.data = weight.new_full((), number).expand(weight.shape)


def is_emptied(weight: Tensor) -> bool:
    """Whether a weight of more than one number has none of them any more."""
    return weight.numel() > 1 and not any(weight.stride())


def held_bytes(tensor: Tensor) -> int:
    """Returns the bytes that a tensor keeps alive."""
    return tensor.element_size() if is_emptied(tensor) else tensor.nbytes
