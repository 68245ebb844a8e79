"""How does a tensor look to whoever minds its numbers only, not their shape?"""

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
