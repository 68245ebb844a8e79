"""What does an operation cost, in floating-point operations? An estimate, for cutting stages."""

from __future__ import annotations

import math

from torch import Tensor

from hires.plan.graph import Node


def flops_of(node: Node, tensors: dict[str, Tensor], before: list[Node], images: list[int]) -> int:
    """Returns two per multiply-add, and one per number of everything else.

    Args:
        node: the operation.
        tensors: parameters and buffers by name.
        before: the operations before it, whose values it reads.
        images: shape of the input, (n, C, H, W).
    """
    if node.shape is None:
        return 0
    weights = [tensors[name] for name in node.params if tensors[name].dim() > 1]
    if node.kind == "conv2d" and weights:
        return 2 * node.num_elements * weights[0][0].numel()
    if node.kind == "linear" and weights:
        return 2 * node.num_elements * weights[0].shape[1]
    if node.kind == "conv_transpose2d" and weights:
        shapes = {made.name: made.shape for made in before}
        read = shapes.get(node.inputs[0], images) or [0]
        return 2 * math.prod(read) * weights[0][0].numel()
    return node.num_elements
