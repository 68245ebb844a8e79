"""Takes the numbers out of tensors of subclasses, which loaders of other libraries return.

A subclass follows its numbers through every operator and may replace any of them; tiles compute
with plain tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hires.core.errors import ConfigError


def plain_tensor(name: str, tensor: Tensor) -> Tensor:
    """Returns a tensor, or the same numbers without the subclass that it is of.

    ConfigError, which calls it ``name``: the subclass holds no numbers of its own, as ``DTensor``.
    """
    kind = type(tensor)
    if kind is Tensor:
        return tensor
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ConfigError(
            f"{name} of type {kind.__name__} hold no numbers of their own; give a plain tensor, of "
            f"a DTensor its to_local() or full_tensor()"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
