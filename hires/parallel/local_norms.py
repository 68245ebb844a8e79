"""Computes group and instance norms of whole maps on a CPU past two faults of torch 2.13.

Both concern gradients of maps that lie channels-last, as ranks hold them:

* Group norm whose input has no gradient (the first layer, or one behind frozen layers): the kernel
  of its backward pass writes that gradient all the same, and the process ends with a segmentation
  fault. So the gradient is computed, and dropped.
* Instance norm of one sample: the gradients of weight and bias are wrong, by as much as their own
  size. Of one sample it is the batch norm of that sample, whose gradients are right.

What torch compiles has kernels of its own. Norms of tiles are in
:mod:`hires.parallel.sample_norms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.parallel.convolution import SUBSTITUTES
from hires.parallel.wide_convolution import by_onednn


@SUBSTITUTES.register("group_norm")
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Returns the group norm of (n, C, ...), as torch's."""
    learns = [one for one in (weight, bias) if one is not None and one.requires_grad]
    if learns and not x.requires_grad and _of_processor(x) and torch.is_grad_enabled():
        x = _WithGradient.apply(x, learns[0])  # type: ignore[no-untyped-call]
    return torch.group_norm(x, num_groups, weight, bias, eps, cudnn_enabled)


@SUBSTITUTES.register("instance_norm")
def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Returns the instance norm of (n, C, ...), as torch's; running statistics move in place."""
    norm = torch.batch_norm if x.shape[0] == 1 and _of_processor(x) else torch.instance_norm
    made: Tensor = norm(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        use_input_stats,
        momentum,
        eps,
        cudnn_enabled,
    )
    return made


class _WithGradient(torch.autograd.Function):
    # A tensor that has a gradient as long as the anchor has one; the gradient is dropped.
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def _of_processor(x: Tensor) -> bool:
    return by_onednn(x) and not torch.compiler.is_compiling()
