"""Views tensors as rows of numbers in memory order, and back."""

from __future__ import annotations

from torch import Tensor


def flat(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's numbers in memory order, as a view.

    Args:
        tensor: contiguous, or channels-last with four dims.
    """
    if tensor.dim() == 4 and not tensor.is_contiguous():
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.view(-1)


def shaped(numbers: Tensor, like: Tensor) -> Tensor:
    """Returns numbers in memory order in the shape of a tensor that lies alike, as a view.

    Args:
        numbers: as :func:`flat` gives them.
        like: contiguous, or channels-last with four dims.
    """
    if like.dim() == 4 and not like.is_contiguous():
        n, channels, height, width = like.shape
        return numbers.view(n, height, width, channels).permute(0, 3, 1, 2)
    return numbers.view(like.shape)
