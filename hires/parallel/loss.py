"""How wrong is the network's output? The loss of one microbatch, whole, in tiles or in shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.comm import all_reduce
from hires.parallel.context import Context
from hires.plan.rules import WHOLE


def loss_of(output: Tensor, labels: Tensor, context: Context) -> Tensor:
    """Returns the mean cross-entropy of one microbatch, on every rank of the stage.

    An output with rows and columns counts every pixel with its image's class. Where it lies in
    tiles or shards, the value is summed over them, and the gradient is that of the own share.
    """
    graph = context.plan.graph
    shape = graph.shape(graph.output)
    if output.dtype != torch.float64:
        output = output.float()
    if len(shape) == 4:
        labels = labels.view(-1, 1, 1).expand(-1, *output.shape[2:])
    count = shape[0] * (shape[2] * shape[3] if len(shape) == 4 else 1)
    loss = F.cross_entropy(output, labels, reduction="sum") / count
    if context.stage.layout[graph.output] != WHOLE and context.stage.num_ranks > 1:
        total = loss.detach().clone()
        all_reduce(total, context.tiles)
        loss = loss + (total - loss.detach())
    return loss
