"""Gives all holders of a stage the tensors that one rank has read, by broadcast.

Every stage has one reader, the rank that also writes its checkpoints: replica 0, direction down,
tile 0. Ranks that hold two stages (GEMS) come to both in the order of the stages:

    reader      tensors of the stage -> | piece | piece | ...   of at most PIECE_BYTES
                                            |       |
    others                                  v       v           tiles, replicas, direction up

So no file is read twice, and a file that differs between nodes cannot make the holders differ. This
is no message of a step: the plan has no route of it, and the default backend carries it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hires.comm import Group, broadcast
from hires.core.units import size
from hires.parallel.context import Context
from hires.parallel.gradients import flat
from hires.plan.groups import gradient_group, held_stages
from hires.plan.plan import Plan

PIECE_BYTES = 2**22
"""Tensors travel in pieces of this size: all memory that sharing adds."""
PROGRESS_S = 5.0

log = logging.getLogger(__name__)


def reader_of(plan: Plan, stage: int) -> int:
    """Returns the rank that reads and writes the files of a stage."""
    return plan.rank_of(0, 0, stage, 0)


def share_weights(context: Context, by_stage: Mapping[int, Sequence[Tensor]]) -> None:
    """Fills the tensors of the stages that this rank holds with those of each stage's reader.

    All ranks call it together, with tensors of equal shapes, types and strides in one order.
    """
    plan = context.plan
    for stage in held_stages(plan, context.rank):
        tensors = [tensor.detach() for tensor in by_stage.get(stage, ())]
        group = context.groups[gradient_group(plan, stage)]
        if group.size > 1 and tensors:
            _broadcast(tensors, group, reader_of(plan, stage), context.rank, f"stage {stage}")


def _broadcast(tensors: Sequence[Tensor], group: Group, source: int, rank: int, what: str) -> None:
    total, done, shown_s = sum(tensor.nbytes for tensor in tensors), 0, time.monotonic()
    for tensor in filter(torch.numel, tensors):
        for piece in torch.split(flat(tensor).view(torch.uint8), PIECE_BYTES):
            broadcast(piece, source, group)
            done += len(piece)
        if rank == source and time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            log.info("%s of %s of the weights of %s are shared", size(done), size(total), what)
