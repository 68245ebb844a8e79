"""Lets compiled backward passes make masks again instead of keeping them.

A ReLU that is compiled for training keeps a mask of booleans, one byte a number. On CPUs torch 2.13
writes them one by one, at 12 ns each: ten times what the ReLU takes. What the mask is made of is
mostly kept anyway, and one comparison in the backward kernel is free.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy


class RecomputedMasks(CustomGraphPass):
    """Marks the booleans of a joint graph, forward and backward, as made again."""

    def __call__(self, graph: Graph) -> None:
        """Marks them."""
        for node in graph.nodes:
            value = node.meta.get("val")
            is_mask = isinstance(value, Tensor) and value.dtype == torch.bool
            if node.op == "call_function" and is_mask:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> str:
        """Returns its version for torch's cache key."""
        return "hires.recomputed_masks.1"
