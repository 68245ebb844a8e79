"""Computes the loss of one microbatch from an output that is whole, in tiles or in shards."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.parallel.context import Context
from hires.plan.rules import WHOLE


def loss_of(output: Tensor, target: Tensor, context: Context) -> Tensor:
    """Returns the mean loss of one microbatch, on every rank of the stage.

    It is the absolute difference where the target is an image, of which this slot has the part of
    its output, and cross-entropy where it is classes: an output with rows and columns counts every
    pixel with its image's class. Where the output lies in tiles or shards, the value is summed over
    them, and the gradient is that of the own share.
    """
    graph = context.plan.graph
    shape = graph.shape(graph.output)
    if output.dtype != torch.float64:
        output = output.float()
    if target.is_floating_point():
        loss = F.l1_loss(output, target, reduction="sum") / math.prod(shape)
    else:
        if len(shape) == 4:
            target = target.view(-1, 1, 1).expand(-1, *output.shape[2:])
        loss = F.cross_entropy(output, target, reduction="sum") / (math.prod(shape) // shape[1])
    if context.stage.layout[graph.output] != WHOLE and context.stage.num_ranks > 1:
        total = loss.detach().clone()
        context.cursor.add_up(total, graph.output)
        loss = loss + (total - loss.detach())
    return loss
