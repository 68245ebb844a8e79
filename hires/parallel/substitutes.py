"""Replaces operators of torch that fail on whole maps as ranks hold them.

Gradients of norms on a CPU, of maps that lie channels-last (torch 2.13):

* Group norm whose input has no gradient (the first layer, or one behind frozen layers): the kernel
  of its backward pass writes that gradient all the same, and the process ends with a segmentation
  fault. The kernel for contiguous maps does not.
* Instance norm of one sample: the gradients of weight and bias are wrong, by as much as their own
  size. Of one sample it is the batch norm of that sample, whose gradients are right.

Order in memory: a network is traced with images in the usual order (n, C, H, W), and a rank holds
them channels-last, so a ``view`` that was possible need not be:

    traced    x.view(n, C * H * W)    the numbers of a sample in a row
    held      n, H, W, C              C is the fastest: the view is made of a copy
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.wide_convolution import by_onednn

SUBSTITUTES: Registry[Callable[..., Tensor]] = Registry("substitute")
"""ATen name -> the function of the same arguments that is called in place of torch's own."""


@SUBSTITUTES.register("group_norm")
def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *how: Any
) -> Tensor:
    """Returns the group norm of (n, C, ...), as torch's."""
    return torch.group_norm(
        x if x.requires_grad else x.contiguous(), num_groups, weight, bias, *how
    )


@SUBSTITUTES.register("instance_norm")
def instance_norm(x: Tensor, *how: Any) -> Tensor:
    """Returns the instance norm of (n, C, ...), as torch's; running statistics move in place."""
    is_one = x.shape[0] == 1 and by_onednn(x) and not torch.compiler.is_compiling()
    normalised: Tensor = (torch.batch_norm if is_one else torch.instance_norm)(x, *how)
    return normalised


@SUBSTITUTES.register("view")
@SUBSTITUTES.register("_unsafe_view")
def view(x: Tensor, size: list[int] | torch.dtype) -> Tensor:
    """Returns the numbers in another shape, or the bytes as another type."""
    return x.contiguous().view(size) if isinstance(size, torch.dtype) else x.reshape(size)


@SUBSTITUTES.register("view_as_complex")
def view_as_complex(x: Tensor) -> Tensor:
    """Returns pairs of numbers, which must lie side by side, as complex ones."""
    return torch.view_as_complex(x.contiguous())


@SUBSTITUTES.register("as_strided")
def as_strided(
    x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> Tensor:
    """Returns numbers at given places of a tensor that was traced in contiguous order."""
    return x.contiguous().as_strided(size, stride, storage_offset or 0)


@SUBSTITUTES.register("kron")
def kron(x: Tensor, other: Tensor) -> Tensor:
    """Returns the Kronecker product, which torch computes by a view of both."""
    return torch.kron(x.contiguous(), other.contiguous())
