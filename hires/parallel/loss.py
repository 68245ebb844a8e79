"""Computes the loss of one microbatch from an output that is whole, in tiles or in shards."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from hires.core.losses import LOSSES
from hires.parallel.context import Context
from hires.plan.rules import WHOLE


def plain_loss(name: str, output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Returns the ``mean`` or ``sum`` of the terms of a loss, as plain torch computes it.

    ``output`` is (n, C) or (n, C, H, W), the target classes (n,) or images of the output's shape.
    """
    loss = LOSSES[name]
    if loss.targets == "classes" and output.dim() == 4:
        target = target.view(-1, 1, 1).expand(-1, *output.shape[2:])
    module, _, function = loss.function.rpartition(":")
    compute = getattr(importlib.import_module(module or "torch.nn.functional"), function)
    value: Tensor = compute(output, target, reduction=reduction)
    return value


def loss_of(name: str, output: Tensor, target: Tensor, context: Context) -> Tensor:
    r"""Returns the mean loss of one microbatch, on every rank of the stage.

    Where the output lies in tiles or shards, the target is the same part of the whole target:

        tile 0   sum of its terms / all terms   \
                                                 + one sum of ranks = loss on all of them
        tile 1   sum of its terms / all terms   /

    The gradient is that of the own part: what other tiles add is a constant here.
    """
    graph = context.plan.graph
    if output.dtype != torch.float64:
        output = output.float()
    num_terms = LOSSES[name].num_terms(graph.shape(graph.output))
    loss = plain_loss(name, output, target, "sum") / num_terms
    if context.stage.layout[graph.output] != WHOLE and context.stage.num_ranks > 1:
        total = loss.detach().clone()
        context.cursor.add_up(total, graph.output)
        loss = loss + (total - loss.detach())
    return loss
